"""Where computed pages go beside the device's cache, and come from: `--kv-transfer-config`, whose keys are vLLM's.

A connector has two halves: one beside the scheduler, which imports no torch, and one in each worker. Knows names and paths.
"""

# ruff: noqa: RUF009  (`setting` makes the field)

import dataclasses
import tempfile
from collections.abc import Mapping
from typing import Any

from quire.config.checks import FLAG, TEXT, Check, mapping, one_of, read_object, setting, whole
from quire.errors import ConfigError
from quire.guards import is_dict, is_mapping, is_sequence
from quire.logger import init_logger
from quire.plugins.registry import Registry

logger = init_logger(__name__)

SETTING = "kv_transfer_config"
HIDDEN_STATES = "hidden_states"
"""The connector that gives away what layers make of tokens, and no pages."""
EXTRACT = "extract_hidden_states"
"""The method of speculation by which vLLM names the layers of which it does."""
LAYERS = Check(
    "a list of layers' numbers",
    lambda value: is_sequence(value) and bool(value) and all(type(each) is int and each >= 0 for each in value),
)


@dataclasses.dataclass(frozen=True)
class KVConnector:
    """A connector by the class paths of its halves.

    Attributes:
        scheduler: a `quire.core.kv_connector.KVConnectorScheduler`.
        worker: a `quire.worker.page_connector.KVConnectorWorker`.
    """

    scheduler: str
    worker: str


KV_CONNECTORS: Registry[KVConnector] = Registry(
    "KV connector",
    SETTING,
    {
        "memory": KVConnector("quire.core.kv_connector:NamedPages", "quire.worker.kv_tiers:MemoryTier"),
        "disk": KVConnector("quire.core.kv_connector:PagesOnDisk", "quire.worker.kv_tiers:DiskTier"),
        "lmcache": KVConnector("quire.core.lmcache:LmcachePages", "quire.worker.kv_tiers:LmcacheTier"),
        "tcp": KVConnector("quire.core.remote_pages:RemotePages", "quire.worker.tcp_tier:TcpTier"),
        "nccl": KVConnector("quire.core.remote_pages:RemotePages", "quire.worker.nccl_tier:NcclTier"),
        "nixl": KVConnector("quire.core.remote_pages:RemotePages", "quire.worker.lent_tier:NixlTier"),
        "mooncake": KVConnector("quire.core.remote_pages:RemotePages", "quire.worker.lent_tier:MooncakeTier"),
        HIDDEN_STATES: KVConnector("quire.core.state_files:StateFiles", "quire.worker.state_copies:StateCopies"),
    },
)
"""By the name that `kv_connector` gives. A plugin registers its own in every process."""

_OF_VLLM: dict[str, tuple[str, dict[str, str]]] = {
    "ExampleConnector": ("disk", {"shared_storage_path": "path"}),
    "ExampleHiddenStatesConnector": (HIDDEN_STATES, {"shared_storage_path": "path"}),
    "OffloadingConnector": ("memory", {"cpu_bytes_to_use": "max_bytes"}),
    "LMCacheConnectorV1": ("lmcache", {"lmcache.remote_url": "remote_url"}),
    "P2pNcclConnector": ("nccl", {}),
    "NixlConnector": ("nixl", {}),
    "MooncakeConnector": ("mooncake", {"mooncake_protocol": "protocol"}),
}
"""vLLM's connectors that do what one of these does: its name, and its keys under vLLM's names."""


@dataclasses.dataclass(frozen=True)
class HiddenStatesConfig:
    """Keys of `kv_connector_extra_config` of the connector `hidden_states`.

    Attributes:
        layers: the states before each of these, counted from 0; before the one behind the last, without the last norm.
        path: the folder of files that a request does not name itself. allow_custom_save_path: it may.
        use_synchronization_lock: a file beside each lets its readers wait.
    """

    layers: list[int] | None = setting(None, LAYERS)
    path: str = setting(tempfile.gettempdir(), TEXT)
    allow_custom_save_path: bool = setting(False, FLAG)
    num_writer_threads: int = setting(8, whole(1, 256))
    use_synchronization_lock: bool = setting(True, FLAG)


@dataclasses.dataclass(frozen=True)
class KVTransferConfig:
    """How pages travel.

    Attributes:
        kv_connector: a name of `KV_CONNECTORS`.
        kv_role: `kv_producer` only saves, `kv_consumer` only loads.
        kv_ip, kv_port: where others ask for pages (`tcp`, `nccl`, `nixl`, `mooncake`): an address, and the first worker's port.
        kv_connector_extra_config: keys of the connector's own.
        engine_id: another name for the pages of this engine; engines with the same name, model and settings share them.
        kv_load_failure_policy: what cannot be loaded is computed, also with vLLM's `fail`.
    """

    kv_connector: str = setting("", TEXT)
    kv_role: str = setting("kv_both", one_of("kv_both", "kv_producer", "kv_consumer"))
    kv_ip: str = setting("127.0.0.1", TEXT)
    kv_port: int = setting(14579, whole(1, 65535))
    kv_connector_extra_config: dict[str, Any] = setting({}, mapping())
    engine_id: str = setting("", TEXT)
    kv_load_failure_policy: str = setting("recompute", one_of("recompute", "fail"))

    @property
    def saves(self) -> bool:
        """Whether computed pages are given away."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether pages of others are taken."""
        return self.kv_role != "kv_producer"

    def hidden_states(self) -> HiddenStatesConfig:
        """What `hidden_states` is to do. Raises ConfigError: a key or a value is not known, or no layers are named."""
        config = read_object(HiddenStatesConfig, f"{SETTING}.kv_connector_extra_config", self.kv_connector_extra_config)
        if config.layers is None:
            message = f"{SETTING}.kv_connector_extra_config.layers: name the layers whose states are wanted, from 0 on"
            raise ConfigError(message, setting=SETTING)
        return config

    def extra(self, *known: str) -> dict[str, Any]:
        """The connector's own keys. Raises ConfigError: one is none of these."""
        given = self.kv_connector_extra_config
        if unknown := sorted(given.keys() - set(known)):
            message = f"{SETTING}.kv_connector_extra_config has {unknown[0]!r}; {self.kv_connector!r} knows {', '.join(known)}"
            raise ConfigError(message, setting=SETTING)
        return given


def _own_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of vLLM's in the words of the connector that does the same here."""
    name, extra = str(given.get("kv_connector")), given.get("kv_connector_extra_config")
    if extra is None:
        extra = dict[str, Any]()
    if name not in _OF_VLLM or not is_dict(extra):
        return dict(given)
    name, keys = _OF_VLLM[name]
    words = {keys.get(str(key), str(key)): value for key, value in extra.items()}
    return {**given, "kv_connector": name, "kv_connector_extra_config": words}


def extracted_layers(speculative: Any) -> Any:
    """The layers that a `speculative_config` with vLLM's method `extract_hidden_states` names; None: it has another method."""
    if not is_mapping(speculative) or speculative.get("method") != EXTRACT:
        return None
    for key in ("draft_model_config", "hf_config", "eagle_aux_hidden_state_layer_ids"):
        speculative = speculative.get(key) if is_mapping(speculative) else None
    return speculative or []


def read_kv_transfer_config(
    given: Mapping[str, Any] | None, offloading_gib: float | None = None, speculative: Any = None
) -> KVTransferConfig | None:
    """What the setting says, or `kv_offloading_size`, which is short for one. `speculative`: the setting of vLLM's that names
    layers. Raises ConfigError: a key, a value or the connector is not known, or both are given."""
    if offloading_gib is not None:
        if given:
            message = f"kv_offloading_size={offloading_gib} and {SETTING} both say where pages go: give one of them"
            raise ConfigError(message, setting="kv_offloading_size")
        given = {"kv_connector": "memory", "kv_connector_extra_config": {"max_bytes": int(offloading_gib * 2**30)}}
    layers = extracted_layers(speculative)
    given = _own_words(given or {})
    if layers is not None:
        if given.get("kv_connector") != HIDDEN_STATES:
            message = f"speculative_config.method={EXTRACT!r} needs {SETTING} with kv_connector {HIDDEN_STATES!r}"
            raise ConfigError(message, setting=SETTING)
        given["kv_connector_extra_config"] = {**given["kv_connector_extra_config"], "layers": layers}
    if not given:
        return None
    config = read_object(KVTransferConfig, SETTING, given)
    if not config.kv_connector:
        known = ", ".join(sorted(KV_CONNECTORS))
        raise ConfigError(f"{SETTING} names no kv_connector; there are {known}", setting=SETTING)
    KV_CONNECTORS.entry(config.kv_connector)
    if config.kv_load_failure_policy == "fail":
        logger.info("%s.kv_load_failure_policy='fail' has no effect: what cannot be loaded is computed", SETTING)
    return config
