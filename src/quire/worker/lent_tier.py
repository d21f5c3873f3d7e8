"""Pages for other engines that another project's library moves: they are asked for as over TCP (`quire.worker.tcp_tier`), and the
answer says where they lie.

Whoever asks reads them there, then asks whether they were still lent: rows are used anew when the connection has ended or took
too long. The libraries are NIXL (https://github.com/ai-dynamo/nixl) and Mooncake (https://github.com/kvcache-ai/Mooncake), over
RDMA, TCP or what else they have. NIXL's own thread would keep a core busy while nothing is moved, so both sides drive a transfer
themselves. Mooncake's engines talk to each other without a metadata server. Knows memory and addresses.
"""

import abc
import contextlib
import functools
import importlib
import socket
import threading
import time
import uuid
from typing import Any

import msgspec
import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING, KVTransferConfig
from quire.errors import ConfigError, refusing
from quire.extras import install_command
from quire.platforms.interface import DeviceRuntime
from quire.worker.tcp_tier import ANSWER, DONE, RowTier, receive, while_connected

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


class NixlTier(LentTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`, and `backends`, names of NIXL's (`["UCX"]`)."""

    KEYS = (*LentTier.KEYS, "backends")
    KIND = 2
    PROGRESS_S = 0.0005

    def open(self, transfer: KVTransferConfig, extra: dict[str, Any]) -> None:
        self._nixl = import_library("nixl._api", "nixl", "nixl")
        backends = extra.get("backends", ["UCX"])
        what = f"{SETTING}.kv_connector_extra_config.backends={backends!r} cannot be used by NIXL"
        with refusing(Exception, setting=SETTING, what=what):  # the library's exceptions have no common base
            settings = self._nixl.nixl_agent_config(
                backends=backends,
                enable_prog_thread=False,
                sync_mode=self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent = self._nixl.nixl_agent(uuid.uuid4().hex, settings)
            if missing := sorted(set(backends) - self._agent.backends.keys()):
                raise ValueError(f"there is no {missing[0]!r}; there are {', '.join(self._agent.get_plugin_list())}")
        self._others: dict[bytes, str] = {}
        self._acquainting = threading.Lock()

    def lend(self, memory: torch.Tensor) -> bytes:
        self._agent.register_memory(memory)
        return self._agent.get_agent_metadata()

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def read_lent(self, lent: Lent, into: torch.Tensor) -> None:
        try:
            here = self._agent.register_memory(into)
            try:
                self._read(lent, into)
            finally:
                self._agent.deregister_memory(here)
        except Exception as error:
            self._forget(lent.ticket)
            raise OSError(f"NIXL: {error}") from error

    def _read(self, lent: Lent, into: torch.Tensor) -> None:
        size = into.shape[1]
        source = self._agent.get_xfer_descs([(place, size, 0) for place in lent.places], "DRAM")
        target = self._agent.get_xfer_descs([(row.data_ptr(), size, 0) for row in into], "DRAM")
        handle = self._agent.initialize_xfer("READ", target, source, self._other(lent.ticket))
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(self.PROGRESS_S)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError("the transfer has failed")

    def _other(self, ticket: bytes) -> str:
        """The name of another engine's agent."""
        with self._acquainting:
            if ticket not in self._others:
                self._others[ticket] = self._agent.add_remote_agent(ticket)
            return self._others[ticket]

    def _forget(self, ticket: bytes) -> None:
        with self._acquainting, contextlib.suppress(Exception):
            self._agent.remove_remote_agent(self._others.pop(ticket))


class MooncakeTier(LentTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`, and `protocol` of the transfer engine (`rdma`)."""

    KEYS = (*LentTier.KEYS, "protocol")
    KIND = 3

    def open(self, transfer: KVTransferConfig, extra: dict[str, Any]) -> None:
        protocol = extra.get("protocol", "rdma")
        library = import_library("mooncake.engine", "mooncake", "mooncake")
        self._engine = library.TransferEngine()
        if not isinstance(protocol, str) or self._engine.initialize(transfer.kv_ip, "P2PHANDSHAKE", protocol, ""):
            text = f"{SETTING}.kv_connector_extra_config.protocol={protocol!r} cannot be used by Mooncake at {transfer.kv_ip}"
            raise ConfigError(text, setting=SETTING)
        self._address = f"{transfer.kv_ip}:{self._engine.get_rpc_port()}"

    def lend(self, memory: torch.Tensor) -> bytes:
        self._register(memory)
        return self._address.encode()

    def read_lent(self, lent: Lent, into: torch.Tensor) -> None:
        self._register(into)
        try:
            rows = [row.data_ptr() for row in into]
            sizes = [into.shape[1]] * len(rows)
            if self._engine.batch_transfer_sync_read(lent.ticket.decode(errors="replace"), rows, lent.places, sizes):
                raise OSError("Mooncake: the transfer has failed")
        finally:
            self._engine.unregister_memory(into.data_ptr())

    def _register(self, memory: torch.Tensor) -> None:
        if self._engine.register_memory(memory.data_ptr(), memory.nbytes):
            raise OSError(f"Mooncake cannot use {memory.nbytes} bytes of memory")
