"""Adds the KV connector `alder` (`--kv-transfer-config '{"kv_connector": "alder"}'`). Its halves are named by their paths."""


def register() -> None:
    """Quire calls this in each of its processes."""
    from quire.config.kv_transfer import KV_CONNECTORS, KVConnector

    halves = KVConnector(scheduler="quire.core.kv_connector:NamedPages", worker="quire_alder.tier:AlderTier")
    KV_CONNECTORS.register("alder", halves)
