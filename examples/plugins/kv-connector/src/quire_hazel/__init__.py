"""Adds the KV connector `hazel` (`--kv-transfer-config '{"kv_connector": "hazel"}'`). Its halves are named by their paths."""


def register() -> None:
    """Quire calls this in each of its processes."""
    from quire.config.kv_transfer import KV_CONNECTORS, KVConnector

    halves = KVConnector(scheduler="quire.core.kv_connector:NamedPages", worker="quire_hazel.tier:HazelTier")
    KV_CONNECTORS.register("hazel", halves)
