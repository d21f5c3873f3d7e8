"""Whether and where an engine tells which pages its prefix cache has: `--kv-events-config`, whose keys are vLLM's."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from quire.config.checks import FLAG, TEXT, Check, one_of, read_object, setting, whole
from quire.errors import ConfigError

SETTING = "kv_events_config"
_ADDRESS = re.compile(r"tcp://.+:\d+|(ipc|inproc)://.+")
ADDRESS = Check(
    "a ZMQ address such as tcp://*:5557 or ipc:///run/events",
    lambda value: isinstance(value, str) and _ADDRESS.fullmatch(value) is not None,
)


@dataclasses.dataclass(frozen=True)
class KVEventsConfig:
    """How events of the prefix cache are published.

    Attributes:
        publisher: `zmq` or `null`; None: `zmq` where events are enabled.
        endpoint: of the PUB socket: bound where it has a `*` or `::` or is no tcp address, else connected to. A copy's number is
            added to its port.
        replay_endpoint: where a ROUTER answers with batches that a subscriber has missed; None: nowhere.
        buffer_steps: batches that are kept for it.
        hwm: batches that wait for a slow subscriber before some are dropped.
        max_queue_size: batches that wait for the publisher before new ones are dropped.
        topic: the first frame of each message.
    """

    enable_kv_cache_events: bool = setting(False, FLAG)
    publisher: str | None = setting(None, one_of("null", "zmq"))
    endpoint: str = setting("tcp://*:5557", ADDRESS)
    replay_endpoint: str | None = setting(None, ADDRESS)
    buffer_steps: int = setting(10_000, whole(1))
    hwm: int = setting(100_000, whole(0))
    max_queue_size: int = setting(100_000, whole(1))
    topic: str = setting("", TEXT)

    def endpoint_of(self, address: str, copy: int) -> str:
        """An address for one of the model's copies: the copy's number is added to its port or name."""
        if not address.startswith("tcp://"):
            return f"{address}_dp{copy}" if copy else address
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + copy}"


def read_kv_events_config(given: Mapping[str, Any] | None) -> KVEventsConfig | None:
    """What the setting says; None: nothing is published. Raises ConfigError: a key or a value is not known."""
    config = read_object(KVEventsConfig, SETTING, given)
    if config.publisher == "zmq" and not config.enable_kv_cache_events:
        raise ConfigError(f"{SETTING} names a publisher, but enable_kv_cache_events is not true", setting=SETTING)
    return config if config.enable_kv_cache_events and config.publisher != "null" else None
