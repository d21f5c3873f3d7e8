"""One engine core for several frontend processes: a router in the process that owns the core, a client in each frontend.

The core does not know that it has several frontends: the router knows each request's frontend by the request's id, and gives
every call a number that names its frontend. Figures of steps go to the first frontend alone: sums over all of them are the
engine's. Starts no process.
"""

import contextlib
import functools
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.codec import encode
from quire.engine import messages
from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.process_client import SocketClient
from quire.request import EngineCoreOutputs

_CALL_BITS = 32
"""A call's number at the core is its frontend's number, then this many bits of the frontend's own number."""
_HERE, _SERVES = b"", b"serves"
"""What a frontend says about itself, in the place of a message."""
_AGAIN_S = 0.2
"""How often a frontend says that it is here while it waits for the core."""


class FrontendSlot(NamedTuple):
    """A frontend's place at the router: the folder of the sockets, its number, a descriptor that is readable (closed) when
    the router's process has died."""

    folder: str
    number: int
    life_fd: int


class FrontendRouter:
    """Between a core's client and the frontends.

    Args:
        folder: where the sockets are made; only its owner may enter it.
        on_serving: called in the router's thread when a frontend answers requests.
    """

    def __init__(self, folder: Path, num_frontends: int, on_serving: Callable[[int], None]) -> None:
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._inbox = self._bind(zmq.PULL, folder / "in")
        self._outboxes = [self._bind(zmq.PUSH, folder / f"out-{number}") for number in range(num_frontends)]
        self._on_serving = on_serving
        self._owners: dict[str, int] = {}
        self._lock = threading.Lock()
        self._client: CoreClient | None = None
        self._greeting: messages.CoreMessage | None = None
        self._decode = messages.decoder_at_core()
        self._end_fd, self._my_end_fd = os.pipe()
        self._thread = threading.Thread(target=self._run, name="frontend-router", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, path: Path) -> Any:
        return messages.zmq_socket(self._context, kind, f"ipc://{path}", bind=True)

    def attach(self, client: CoreClient) -> None:
        """The core runs: tell the frontends that wait for it."""
        self._client = client
        self._greet(client.ready)

    def _greet(self, message: messages.CoreMessage) -> None:
        """Tell all frontends, also those that come later."""
        self._greeting = message
        for number in range(len(self._outboxes)):
            self._send(number, message)

    def _send(self, number: int, message: messages.CoreMessage) -> None:
        """To one frontend; a message to a frontend that is gone is lost."""
        with self._lock, contextlib.suppress(self._zmq.Again):
            self._outboxes[number].send(encode(message), self._zmq.NOBLOCK)

    # --- from the core, in its thread ---

    def on_message(self, message: messages.CoreMessage) -> None:
        """Pass the core's messages on to the frontends that they concern."""
        match message:
            case messages.Outputs(outputs=outputs):
                for number, part in enumerate(self._split(outputs)):
                    if part.has_content:
                        self._send(number, messages.Outputs(part))
            case messages.UtilityResult(call_id=call_id):
                own_id = call_id & (1 << _CALL_BITS) - 1
                self._send(call_id >> _CALL_BITS, msgspec.structs.replace(message, call_id=own_id))
            case messages.GivenUp(core_ids=core_ids):
                numbers = [self._owners.pop(core_id) for core_id in core_ids if core_id in self._owners]
                if numbers:  # siblings have one frontend
                    self._send(numbers[0], message)
            case messages.Dead():
                self._greet(message)
            case messages.Restarting() | messages.Restarted() | messages.Stalled():
                for number in range(len(self._outboxes)):
                    self._send(number, message)
            case _:
                pass

    def _split(self, outputs: EngineCoreOutputs) -> list[EngineCoreOutputs]:
        owners = self._owners
        parts = [EngineCoreOutputs(weights=outputs.weights, engine=outputs.engine) for _ in self._outboxes]
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
        for part in parts:
            part.queue = outputs.queue
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
                message.call_id |= number << _CALL_BITS
            case _:
                return
        if self._client is not None:
            self._client.send(message)

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


class RoutedClient(SocketClient):
    """The core as one of several frontends sees it. Waits until it runs.

    Args:
        on_message: called in the listening thread.

    Raises:
        ConfigError: the core refused its configuration.
        EngineDeadError: it could not start.
    """

    def __init__(self, slot: FrontendSlot, on_message: OnMessage) -> None:
        self._number = bytes([slot.number])
        end_fd, self._my_end_fd = os.pipe()
        super().__init__(
            f"ipc://{slot.folder}/in",
            f"ipc://{slot.folder}/out-{slot.number}",
            bind=False,
            life_fds=(slot.life_fd, end_fd),
            release=functools.partial(_close, end_fd, self._my_end_fd),
            on_message=on_message,
        )
        try:
            self._send_data(_HERE)
            while not self._await_ready(_AGAIN_S):  # we may have been answered before our socket could be reached
                self._send_data(_HERE)
        except BaseException:
            self.shutdown()
            raise
        self._start_listener()

    def _send_data(self, *frames: bytes) -> None:
        super()._send_data(self._number, *frames)

    def serves(self) -> None:
        """Tell the router that requests are answered here."""
        self._send_data(_SERVES)

    def _describe_death(self) -> str:
        return "the server's main process has ended"

    def _leave(self) -> None:
        """This frontend leaves; the core goes on."""
        os.write(self._my_end_fd, b"!")


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def first_serial() -> int:
    """Where a frontend's numbers of requests begin: not where another one's do, nor its predecessor's."""
    return secrets.randbits(40) << 20
