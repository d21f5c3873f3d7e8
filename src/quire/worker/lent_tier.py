"""Pages for other engines that another project's library moves: they are asked for as over TCP (`quire.worker.tcp_tier`), and the
answer says where they lie.

What is kept for others lies in one piece of memory that the library knows. Whoever asks reads it there, then asks whether it was
still lent: rows are used anew when the connection has ended or took too long. Knows memory and addresses.
"""

import abc
import functools
import importlib
import socket
import time
import weakref
from collections import deque
from typing import Any

import msgspec
import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING, KVTransferConfig
from quire.errors import ConfigError
from quire.extras import install_command
from quire.platforms.interface import DeviceRuntime
from quire.threads import call_within
from quire.worker.page_store import PageStore
from quire.worker.tcp_tier import ANSWER, TcpTier, receive

_MOST_ANSWER = 1 << 24
_DONE = b"\x01"
"""Whoever has read says it, and is told it as long as what it read was still lent."""


class Lent(msgspec.Struct, array_like=True):
    """Where pages lie: the library's own word for the memory of that engine, and each page's address in it."""

    ticket: bytes
    places: list[int]


class LentTier(TcpTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`, and of the library.

    Raises:
        ConfigError: the library is not installed, or does not work here.
    """

    KIND: int
    """Of an answer whose pages this library moves."""
    PROGRESS_S = 0.1
    """How often `progress` is called while somebody reads."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        transfer = config.kv_transfer
        assert transfer is not None
        self.open(transfer, transfer.extra("max_bytes", *self.KEYS))
        super().__init__(config, runtime)
        self._rows: torch.Tensor | None = None
        self._free = deque[int]()
        self._ticket = b""

    @abc.abstractmethod
    def open(self, transfer: KVTransferConfig, extra: dict[str, Any]) -> None:
        """Start the library. Raises ConfigError."""

    @abc.abstractmethod
    def lend(self, memory: torch.Tensor) -> bytes:
        """Let others read this memory until the engine ends; the ticket with which they do."""

    @abc.abstractmethod
    def read_lent(self, lent: Lent, into: torch.Tensor) -> None:
        """Fill rows with another engine's pages. Returns only when nothing will write there any more; from several threads.
        Raises OSError."""

    # What others ask for.

    def register_kv_caches(self, pages: PageStore) -> None:
        super().register_kv_caches(pages)
        transfer = self.config.kv_transfer
        if self._rows is None and transfer is not None and transfer.saves:
            count = self._most // pages.page_bytes + 1  # a page is kept before the oldest one goes
            self._rows = torch.empty((count, pages.page_bytes), dtype=torch.uint8)
            self._free.extend(range(count))
            try:
                self._ticket = self.lend(self._rows)
            except Exception as error:  # the libraries' exceptions have no common base
                text = f"{self._rows.nbytes >> 20} MiB of memory cannot be lent to others ({error}): lower max_bytes, or raise "
                raise ConfigError(f"{SETTING}: {text}the limit of locked memory", setting=SETTING) from error

    def copy_of(self, page: torch.Tensor) -> torch.Tensor:
        if self._rows is None or not self._free:
            raise OSError("all memory for pages is being read by others")
        number = self._free.popleft()
        row = self._rows[number].copy_(page)
        weakref.finalize(row, self._free.append, number).atexit = False  # nobody keeps or sends it any more
        return row

    def hand_over(self, client: socket.socket, pages: list[torch.Tensor]) -> None:
        lent = msgspec.msgpack.encode(Lent(self._ticket, [page.data_ptr() for page in pages]))
        client.sendall(ANSWER.pack(self.KIND, len(lent)) + lent)
        deadline = time.monotonic() + self._timeout_s
        client.settimeout(self.PROGRESS_S)
        while (done := _read_when_there(client)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("they were not read in time")
            self.progress()
        client.sendall(done)

    def progress(self) -> None:
        """Somebody reads: do the part of it that a library without a thread of its own leaves to whoever calls it."""

    # What this engine asks others for.

    def take_over(self, server: socket.socket, kind: int, size: int, count: int, deadline: float) -> torch.Tensor:
        if kind != self.KIND:
            return super().take_over(server, kind, size, count, deadline)
        if size > _MOST_ANSWER:
            raise ValueError(f"it sends {size} bytes to say where {count} pages are")
        try:
            lent = msgspec.msgpack.decode(receive(server, size, deadline), type=Lent)
        except msgspec.MsgspecError as error:
            raise ValueError(f"it does not say where pages are: {error}") from error
        if len(lent.places) != count:
            raise ValueError(f"it lends {len(lent.places)} of {count} pages")
        into = torch.empty((count, self.pages.page_bytes), dtype=torch.uint8)
        # The thread that reads keeps the memory until the library has ended with it.
        call_within(deadline - time.monotonic(), functools.partial(self.read_lent, lent, into), "kv-read")
        server.sendall(_DONE)
        receive(server, len(_DONE), deadline)
        return into


def _read_when_there(client: socket.socket) -> bytearray | None:
    """The word of somebody who has read; None: it has not come yet. Raises OSError: the connection has ended."""
    try:
        return receive(client, len(_DONE))
    except TimeoutError:
        return None


def import_library(module: str, connector: str, extra: str) -> Any:
    """A connector's library. Raises ConfigError: it is not installed, or something it needs is not."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{SETTING}: kv_connector {connector!r} needs a package that cannot be imported ({error}): {install_command(extra)}; "
            "'tcp' does the same over plain connections",
            setting=SETTING,
        ) from error
