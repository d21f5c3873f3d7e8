"""Pages for other engines that go from one device's memory to another's: NCCL between GPUs, gloo between CPUs.

They are asked for as over TCP (`quire.worker.tcp_tier`). The answer says where the two meet, and both join a process group, which
later transfers use again. When something goes wrong both leave it and meet anew the next time. Each side's part runs beside the
steps, in a thread that nobody waits for longer than a fetch may take.
"""

import functools
import os
import socket
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from quire.config import EngineConfig
from quire.distributed.groups import has_library
from quire.distributed.page_link import PageLink, open_meeting
from quire.platforms.interface import DeviceRuntime, is_host_memory
from quire.threads import begin_call
from quire.worker.tcp_tier import ANSWER, RowTier, receive, while_connected

_PORT = struct.Struct("!H")
"""Where the two meet, at the address that was asked."""
_NAME_BYTES = 16
"""Of a link; whoever asks says by which one the pages are to come, after this answer."""
_MOST_PARTNERS = 16


class _Partner:
    """Another engine's worker, and the link to it; one transfer at a time.

    Args:
        key: by which it is found.
        name: of the link.
        make: makes it.
    """

    def __init__(self, key: object, name: bytes, make: Callable[[], PageLink]) -> None:
        self.key, self.name, self.lock = key, name, threading.Lock()
        self._make, self._is_left = make, False
        self._link: PageLink | None = None

    def link(self) -> PageLink:
        """Raises RuntimeError: the other one does not come."""
        self._link = self._link or self._make()
        if self._is_left:
            self._link.abort()
            raise RuntimeError("it was given up meanwhile")
        return self._link

    def leave(self) -> None:
        """Give up; what was begun ends in its thread."""
        self._is_left = True
        if self._link is not None:
            self._link.abort()


class NcclTier(RowTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`; `max_bytes` is the device's memory."""

    KIND = 4
    KIND_OF_MEMORY = "device"

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        super().__init__(config, runtime)
        self.place = runtime.device() if has_library(runtime.device()) else torch.device("cpu")
        self.device_bytes = 0 if is_host_memory(self.place) else self._most
        self._partners = OrderedDict[object, _Partner]()
        self._meeting: tuple[str, int] = ("", 0)
        self._threads = weakref.WeakSet[threading.Thread]()
        self._store: Any = None

    def lend(self, memory: torch.Tensor) -> bytes:
        assert self.config.kv_transfer is not None
        self._store, self._meeting = open_meeting(self.config.kv_transfer.kv_ip)
        return _PORT.pack(self._meeting[1])

    def copy_of(self, page: torch.Tensor) -> torch.Tensor:
        row = super().copy_of(page)
        self._wait_for_device()
        return row

    def _wait_for_device(self) -> None:
        event = self.runtime.event()
        event.record()
        event.wait()

    # Both sides.

    def _partner(self, key: object, name: bytes, place: tuple[str, int], rank: int) -> _Partner:
        make = functools.partial(PageLink, place, name.hex(), rank, self.place, self._timeout_s)
        with self._lock:
            partner = self._partners.setdefault(key, _Partner(key, name, make))
            self._partners.move_to_end(key)
            oldest = next(iter(self._partners.values()))
        if len(self._partners) > _MOST_PARTNERS:
            self._leave(oldest)
        return partner

    def _leave(self, partner: _Partner) -> None:
        with self._lock:
            if self._partners.get(partner.key) is partner:
                del self._partners[partner.key]
        begin_call(functools.partial(self._run, partner.leave), "kv-leave")

    def _run(self, call: Callable[[], None]) -> None:
        """In a thread that may have to be left alone."""
        self._threads.add(threading.current_thread())
        call()

    def _move(self, partner: _Partner, submit: Callable[[PageLink], None]) -> None:
        """This side's part of a transfer."""
        try:
            with self.runtime.beside_steps():
                submit(partner.link())
                self._wait_for_device()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def _transfer(
        self, peer: socket.socket, deadline: float, partner: _Partner, submit: Callable[[PageLink], None]
    ) -> None:
        """With whom it fails is met anew the next time. Raises OSError."""
        try:
            move = functools.partial(self._move, partner, submit)
            while_connected(peer, deadline, functools.partial(self._run, move))
        except OSError:
            self._leave(partner)
            raise

    # What others ask for.

    def hand_over(self, client: socket.socket, pages: list[torch.Tensor]) -> None:
        deadline = time.monotonic() + self._timeout_s
        client.sendall(ANSWER.pack(self.KIND, len(self.ticket)) + self.ticket)
        name = bytes(receive(client, _NAME_BYTES, deadline))
        partner = self._partner(name, name, self._meeting, 0)
        with partner.lock:
            self._transfer(client, deadline, partner, lambda link: link.send(pages))

    # What this engine asks others for.

    def take_over(self, server: socket.socket, kind: int, size: int, count: int, deadline: float) -> torch.Tensor:
        if kind != self.KIND:
            return super().take_over(server, kind, size, count, deadline)
        if size != _PORT.size:
            raise ValueError("it does not say where to meet")
        place = (server.getpeername()[0], *_PORT.unpack(receive(server, size, deadline)))
        into = torch.empty((count, self.pages.page_bytes), dtype=torch.uint8, device=self.place)
        partner = self._partner(place, os.urandom(_NAME_BYTES), place, 1)
        with partner.lock:
            server.sendall(partner.name)
            self._transfer(server, deadline, partner, lambda link: link.receive(into))
        return into

    def shutdown(self) -> None:
        super().shutdown()
        for partner in list(self._partners.values()):
            self._leave(partner)
        self._store = None  # whoever waits there for somebody waits no more
        deadline = time.monotonic() + self._timeout_s
        for thread in list(self._threads):
            # One that came back from its library when Python has ended would abort the process.
            thread.join(max(0.0, deadline - time.monotonic()))
