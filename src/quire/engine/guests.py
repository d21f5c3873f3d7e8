"""One engine core for several frontend processes: a router in the process that owns the core, a channel in each frontend.

A frontend's requests are known by their ids, its calls by their numbers, so that the core need not know that it has guests.
Figures of steps go to the first frontend alone: sums over all of them are the engine's. Knows sockets and messages; starts no
process.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quire.engine import messages
from quire.engine.core_client import CoreChannel, OnMessage
from quire.errors import ConfigError, EngineDeadError
from quire.logger import init_logger
from quire.request import EngineCoreOutputs

logger = init_logger(__name__)

CALL_BITS = 32
"""A call's number is its frontend's number, then this many bits that count."""
_HERE, _SERVES = b"", b"serves"
"""What a frontend says about itself, in the place of a message."""
_AGAIN_MS = 200
"""How often a frontend says that it is here while it waits for the core."""


class Seat(NamedTuple):
    """A frontend's place at the router: its number, the folder of the sockets, a descriptor that is readable (closed) when
    the router's process has died."""

    folder: str
    number: int
    life_fd: int


class GuestRouter:
    """Between a core's channel and the frontends.

    Args:
        folder: where the sockets are made; only its owner may enter it.
        on_serving: called in the router's thread when a frontend answers requests.
    """

    def __init__(self, folder: Path, num_guests: int, on_serving: Callable[[int], None]) -> None:
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._inbox = self._bind(zmq.PULL, folder / "in")
        self._outboxes = [self._bind(zmq.PUSH, folder / f"out-{number}") for number in range(num_guests)]
        self._on_serving = on_serving
        self._owners: dict[str, int] = {}
        self._lock = threading.Lock()
        self._channel: CoreChannel | None = None
        self._greeting: messages.CoreMessage | None = None
        self._decode = messages.frontend_to_core().decode
        self._encode = messages.core_to_frontend().encode
        self._end_fd, self._my_end_fd = os.pipe()
        self._thread = threading.Thread(target=self._run, name="guest-router", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, path: Path) -> Any:
        return messages.zmq_socket(self._context, kind, f"ipc://{path}", bind=True)

    def attach(self, channel: CoreChannel) -> None:
        """The core runs: tell those that wait for it."""
        self._channel = channel
        self._greet(channel.ready)

    def _greet(self, message: messages.CoreMessage) -> None:
        """Tell all, and whoever comes later."""
        self._greeting = message
        for number in range(len(self._outboxes)):
            self._send(number, message)

    def _send(self, number: int, message: messages.CoreMessage) -> None:
        """To one frontend; what is said to none is lost."""
        with self._lock, contextlib.suppress(self._zmq.Again):
            self._outboxes[number].send(self._encode(message), self._zmq.NOBLOCK)

    # --- from the core, in its thread ---

    def on_message(self, message: messages.CoreMessage) -> None:
        """Pass the core's news on to those whom they concern."""
        match message:
            case messages.Outputs(outputs=outputs):
                for number, part in enumerate(self._split(outputs)):
                    if part.plain_ids or part.outputs or part.stats is not None:
                        self._send(number, messages.Outputs(part))
            case messages.UtilityResult(call_id=call_id):
                self._send(call_id >> CALL_BITS, message)
            case messages.Dead():
                self._greet(message)
            case _:
                pass

    def _split(self, outputs: EngineCoreOutputs) -> list[EngineCoreOutputs]:
        owners = self._owners
        parts = [EngineCoreOutputs() for _ in self._outboxes]
        for core_id, token_id in zip(outputs.plain_ids, outputs.plain_tokens, strict=True):
            number = owners.get(core_id)
            if number is not None:
                parts[number].plain_ids.append(core_id)
                parts[number].plain_tokens.append(token_id)
        for output in outputs.outputs:
            is_last = output.finish_reason is not None
            number = owners.pop(output.request_id, None) if is_last else owners.get(output.request_id)
            if number is not None:
                parts[number].outputs.append(output)
        parts[0].stats = outputs.stats
        return parts

    # --- from the frontends, in the router's thread ---

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._inbox, self._zmq.POLLIN)
        poller.register(self._end_fd, self._zmq.POLLIN)
        while self._end_fd not in dict(poller.poll()):
            sender, data = self._inbox.recv_multipart()
            number = sender[0]
            if data == _HERE:
                if self._greeting is not None:
                    self._send(number, self._greeting)
            elif data == _SERVES:
                self._on_serving(number)
            else:
                self._forward(number, self._decode(data))

    def _forward(self, number: int, message: messages.FrontendMessage) -> None:
        match message:
            case messages.AddRequests(requests=requests):
                for request in requests:
                    self._owners[request.request_id] = number
            case messages.AbortRequests(request_ids=request_ids):
                for core_id in request_ids:
                    self._owners.pop(core_id, None)
            case messages.UtilityCall():
                pass
            case _:
                return
        if self._channel is not None:
            self._channel.send(message)

    def forget(self, number: int) -> int:
        """A frontend has died: abort its requests; how many there were."""
        core_ids = [core_id for core_id, owner in list(self._owners.items()) if owner == number]
        if core_ids:
            self._forward(number, messages.AbortRequests(core_ids))
        return len(core_ids)

    def close(self) -> None:
        """End the router, after the core."""
        os.close(self._my_end_fd)
        self._thread.join()
        os.close(self._end_fd)
        with self._lock:
            self._context.destroy(linger=0)


class GuestChannel(CoreChannel):
    """The core as one of several frontends sees it. Waits until it runs.

    Args:
        on_message: called in the listening thread.

    Raises:
        EngineDeadError: it could not start.
    """

    shares_memory = False

    def __init__(self, seat: Seat, on_message: OnMessage) -> None:
        import zmq

        self._seat = seat
        self._on_message = on_message
        self._context = zmq.Context()
        self._encode, self._decode = messages.frontend_to_core().encode, messages.core_to_frontend().decode
        self._lock = threading.Lock()
        self._is_closed = False
        self._end_fd, self._my_end_fd = os.pipe()
        self._out = self._connect(zmq.PUSH, "in")
        self._in = self._connect(zmq.PULL, f"out-{seat.number}")
        try:
            self._wait_for_core()
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._listen, name="engine-core-listener", daemon=True)
        self._thread.start()

    def _wait_for_core(self) -> None:
        self._tell(_HERE)
        while not isinstance(message := self._receive(_AGAIN_MS), messages.Ready):
            match message:  # what was meant for a frontend that had this seat before is passed over
                case None:  # we may have been answered before our socket could be reached
                    self._tell(_HERE)
                case messages.Dead(message=text, is_config_error=True, setting=setting):
                    raise ConfigError(text, setting=setting)
                case messages.Dead(message=text):
                    raise EngineDeadError(text)
                case _:
                    pass
        self.ready = message

    def _connect(self, kind: int, name: str) -> Any:
        return messages.zmq_socket(self._context, kind, f"ipc://{self._seat.folder}/{name}", bind=False)

    def _tell(self, data: bytes) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._out.send_multipart([bytes([self._seat.number]), data])

    def _receive(self, timeout_ms: int | None = None) -> messages.CoreMessage | None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._in, zmq.POLLIN)
        poller.register(self._seat.life_fd, zmq.POLLIN)
        poller.register(self._end_fd, zmq.POLLIN)
        ready = dict(poller.poll(timeout_ms))
        if self._end_fd in ready:
            return messages.Dead("the engine was shut down")
        if self._in in ready:
            return self._decode(self._in.recv())
        return messages.Dead("the server's main process has ended") if ready else None

    def _listen(self) -> None:
        message: messages.CoreMessage | None = None
        while not isinstance(message, messages.Dead):
            message = self._receive()
            if message is not None:
                self._on_message(message)

    def send(self, message: messages.FrontendMessage) -> None:
        self._tell(self._encode(message))

    def serves(self) -> None:
        """Tell the router that requests are answered here."""
        self._tell(_SERVES)

    def shutdown(self) -> None:
        """This frontend leaves; the core goes on. May be called twice."""
        if not self._is_closed:
            os.close(self._my_end_fd)
            self._thread.join()
            self._my_end_fd = -1
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._my_end_fd >= 0:
                os.close(self._my_end_fd)
            os.close(self._end_fd)
            self._context.destroy(linger=0)


def first_serial() -> int:
    """Where a frontend's numbers of requests begin: not where another one's do, nor its predecessor's."""
    return secrets.randbits(40) << 20
