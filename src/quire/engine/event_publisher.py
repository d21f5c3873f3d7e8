"""Publishes what the prefix cache has, over ZMQ as vLLM does: a hook of the engine core, and a thread with the sockets.

A message has three frames: topic, sequence number (8 bytes, big endian), a batch in msgpack. Who has missed some asks the replay
socket (a DEALER: an empty frame, the first number wanted) and gets an empty frame, topic, number and batch of each that is kept,
then the number -1. Knows sockets; knows nothing of what events mean.
"""

import threading
import time
import uuid
from collections import deque
from typing import Any

import msgspec

from quire import envs
from quire.config import EngineConfig
from quire.config.kv_events import SETTING, KVEventsConfig
from quire.config.kv_spec import KVCacheConfig
from quire.core.cache_events import AnyEvent, CacheEvents, EventBatch
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.engine.hooks import CoreHooks
from quire.errors import ConfigError
from quire.logger import init_logger

logger = init_logger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""What follows the last batch of a replay."""
_LINGER_MS = 1000
"""How long what was said may take to leave an ending process."""


class EventPublisher:
    """Sends batches in a thread of its own. `publish` and `shutdown` are called in one thread and wait for nobody.

    Args:
        copy: the model's copy, whose number is added to the ports.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, copy: int) -> None:
        import zmq

        self._zmq: Any = zmq
        self._config, self._next = config, 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._topic = config.topic.encode()
        context: Any = self._zmq.Context.instance()
        self._inbox: Any = context.socket(zmq.PULL)
        self._outbox: Any = context.socket(zmq.PUSH)
        self._inbox.set_hwm(config.max_queue_size)
        name = f"inproc://cache-events-{uuid.uuid4().hex}"
        self._inbox.bind(name)
        self._outbox.connect(name)
        self._sockets: list[Any] = [self._inbox, self._outbox]
        self._publish: Any = self._open(zmq.PUB, config.endpoint_of(config.endpoint, copy))
        self._replay: Any = None
        if config.replay_endpoint is not None:
            self._replay = self._open(zmq.ROUTER, config.endpoint_of(config.replay_endpoint, copy), always_binds=True)
        self._thread = threading.Thread(target=self._run, name="cache-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, address: str, *, always_binds: bool = False) -> Any:
        socket: Any = self._zmq.Context.instance().socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(self._config.hwm if kind == self._zmq.PUB else 2 * (self._config.buffer_steps + 1))
        binds = always_binds or not address.startswith("tcp://") or "*" in address or "::" in address
        try:
            (socket.bind if binds else socket.connect)(address)
        except self._zmq.ZMQError as error:
            self._close()
            raise ConfigError(f"{SETTING}: {address} cannot be used: {error}", setting=SETTING) from error
        return socket

    def publish(self, batch: EventBatch) -> None:
        """Have a batch sent. One that finds no room is dropped, and its number is missing."""
        number, self._next = self._next.to_bytes(8, "big"), self._next + 1
        try:
            self._outbox.send_multipart([number, msgspec.msgpack.encode(batch)], self._zmq.NOBLOCK)
        except self._zmq.Again:
            logger.warning_once("events of the prefix cache are dropped: max_queue_size of %s are waiting", SETTING)

    def shutdown(self) -> None:
        """Send what waits, and end; may be called twice."""
        if self._thread.is_alive():
            self._outbox.send_multipart([b""])
            self._thread.join()
        self._close()

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=_LINGER_MS)

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._inbox, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if not self._send_waiting():
                return
            if self._replay is not None and self._replay in ready:  # behind what was said before
                self._answer(self._replay.recv_multipart())

    def _send_waiting(self) -> bool:
        """Send all batches that wait; whether more may come."""
        while True:
            try:
                frames: list[bytes] = self._inbox.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return True
            if len(frames) == 1:
                return False
            number, payload = frames
            self._publish.send_multipart([self._topic, number, payload])
            self._kept.append((number, payload))

    def _answer(self, frames: list[bytes]) -> None:
        """Send all that is kept from the number on that somebody asks for."""
        if len(frames) != 3 or len(frames[2]) != len(END):
            logger.warning("a request to the replay socket is not an empty frame and a number of 8 bytes")
            return
        who, _, first = frames
        for number, payload in self._kept:
            if number >= first:  # equally long, big endian
                self._replay.send_multipart([who, b"", self._topic, number, payload])
        self._replay.send_multipart([who, b"", b"", END, b""])


class PublishCacheEvents(CoreHooks):
    """Publishes what a core's prefix cache has: behind each step, and when the core has nothing to do.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, config: EngineConfig, settings: KVEventsConfig, kv_cache: KVCacheConfig) -> None:
        super().__init__(config)
        self._copy = config.parallel.copy_number
        self._publisher = EventPublisher(settings, self._copy)
        numbers = envs.QUIRE_KV_EVENTS_USE_INT_BLOCK_HASHES
        self.events = CacheEvents(kv_cache.groups, self._publish, numbers=numbers)

    def _publish(self, events: list[AnyEvent]) -> None:
        self._publisher.publish(EventBatch(time.time(), events, self._copy))

    def after_step(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        self.events.flush()

    def idle(self) -> bool:
        self.events.flush()
        return False

    def shutdown(self) -> None:
        self.events.flush()
        self._publisher.shutdown()


def event_hooks(config: EngineConfig, kv_cache: KVCacheConfig, kv: KVCacheManager) -> list[CoreHooks]:
    """What publishes the events of a core's pages, if the configuration asks for it. Raises as `PublishCacheEvents`."""
    if config.kv_events is None:
        return []
    hook = PublishCacheEvents(config, config.kv_events, kv_cache)
    kv.tell(hook.events)
    return [hook]
