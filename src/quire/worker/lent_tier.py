"""Pages for other engines that another project's library moves: they are asked for as over TCP (`quire.worker.tcp_tier`), and the
answer says where they lie.

Whoever asks reads them there, then asks whether they were still lent: rows are used anew when the connection has ended or took
too long. Knows memory and addresses.
"""

import abc
import functools
import importlib
import socket
import time
from typing import Any

import msgspec
import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING, KVTransferConfig
from quire.errors import ConfigError
from quire.extras import install_command
from quire.platforms.interface import DeviceRuntime
from quire.worker.row_tier import RowTier
from quire.worker.tcp_tier import ANSWER, DONE, receive, while_connected

_MOST_ANSWER = 1 << 24


class Lent(msgspec.Struct, array_like=True):
    """Where pages lie: the library's own word for the memory of that engine, and each page's address in it."""

    ticket: bytes
    places: list[int]


class LentTier(RowTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`, and of the library.

    Raises:
        ConfigError: the library is not installed, or does not work here.
    """

    PROGRESS_S = 0.1
    """How often `progress` is called while somebody reads."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        transfer = config.kv_transfer
        assert transfer is not None
        self.open(transfer, transfer.extra("max_bytes", *self.KEYS))
        super().__init__(config, runtime)

    @abc.abstractmethod
    def open(self, transfer: KVTransferConfig, extra: dict[str, Any]) -> None:
        """Start the library. Raises ConfigError."""

    @abc.abstractmethod
    def read_lent(self, lent: Lent, into: torch.Tensor) -> None:
        """Fill rows with another engine's pages. Returns only when nothing will write there any more; from several threads.
        Raises OSError."""

    # What others ask for.

    def hand_over(self, client: socket.socket, pages: list[torch.Tensor]) -> None:
        lent = msgspec.msgpack.encode(Lent(self.ticket, [page.data_ptr() for page in pages]))
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
        # The thread that reads keeps the memory until the library has ended with it. The other side says at the end that it
        # was still lent.
        while_connected(server, deadline, functools.partial(self.read_lent, lent, into))
        return into


def _read_when_there(client: socket.socket) -> bytearray | None:
    """The word of somebody who has read; None: it has not come yet. Raises OSError: the connection has ended."""
    try:
        return receive(client, len(DONE))
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
