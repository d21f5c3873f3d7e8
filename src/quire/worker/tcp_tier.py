"""Pages for other engines over TCP: a server for what this engine has computed for them, and a client for what they have.

A request has the digest of what pages depend on besides their tokens, and names; the answer has all pages, where they lie
(`quire.worker.lent_tier`), or a reason. Each worker serves its own part of pages at its own port. What does not come in time or
whole is an error: the prompt is computed. Pages that travel another way lie in one piece of memory (`RowTier`), which is taken
when the engine starts: a row has one page, and is used anew when nobody keeps or sends it any more. Knows names and bytes.
"""

import abc
import concurrent.futures
import contextlib
import functools
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING
from quire.core.kv_connector import identity
from quire.errors import ConfigError, refusing
from quire.logger import init_logger
from quire.platforms.interface import DeviceRuntime
from quire.threads import begin_call
from quire.worker.kv_tiers import MemoryTier, PageRows
from quire.worker.page_connector import Pages

logger = init_logger(__name__)

MAGIC = b"quire-kv-pages-1"
_ASKED = struct.Struct("!16s16sII")
"""Magic, digest, bytes of a name, number of names."""
ANSWER = struct.Struct("!BQ")
"""What it is, and how many bytes follow: pages, or a reason."""
_PAGES, _REASON = 0, 1
_MOST_NAMES = 1 << 20
_MOST_NAME_BYTES = 64
_MOST_CLIENTS = 16
_CHUNK = 1 << 20
DONE = b"\x01"
"""What a side says that has done its part of a transfer beside the connection."""


class Unavailable(Exception):
    """Why pages cannot be had."""


class TcpTier(MemoryTier):
    """Keys of `kv_connector_extra_config`: `max_bytes` that are kept for others, `timeout_s` that a fetch may take, `peers`.

    Raises:
        ConfigError: the port is taken.
    """

    KEYS = ("timeout_s", "peers")

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        transfer = config.kv_transfer
        assert transfer is not None
        self._timeout_s = _seconds(transfer.extra("max_bytes", *self.KEYS).get("timeout_s", 10.0))
        self._digest = bytes.fromhex(identity(config, across_hosts=True))
        self._rank = config.parallel.world_rank
        self._pending: dict[bytes, int] = {}
        super().__init__(config, runtime)
        self.most_unsaved = self._most
        self._saved = threading.Condition(self._lock)
        self._server: socket.socket | None = None
        self._clients = concurrent.futures.ThreadPoolExecutor(_MOST_CLIENTS, thread_name_prefix="kv-serve")
        if transfer.saves:
            self._server = _listen(transfer.kv_ip, transfer.kv_port + config.parallel.device_number)
            threading.Thread(target=self._accept, args=(self._server,), name="kv-accept", daemon=True).start()

    # What others ask for.

    def will_save(self, names: Sequence[bytes]) -> None:
        with self._lock:
            for name in names:
                self._pending[name] = self._pending.get(name, 0) + 1

    def was_saved(self, name: bytes) -> None:
        with self._saved:
            if (left := self._pending.pop(name) - 1) > 0:
                self._pending[name] = left
            self._saved.notify_all()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the server was closed
            while True:
                client, _ = server.accept()
                self._clients.submit(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        """Answer one request."""
        with client:
            try:
                client.settimeout(self._timeout_s)
                try:
                    pages = self._wait_for(self._read_request(client))
                except Unavailable as error:
                    reason = str(error).encode()
                    client.sendall(ANSWER.pack(_REASON, len(reason)) + reason)
                    return
                self.hand_over(client, pages)
            except (OSError, ValueError) as error:
                logger.warning("pages could not be sent: %s", error)

    def hand_over(self, client: socket.socket, pages: list[torch.Tensor]) -> None:
        """Give somebody these pages. Raises OSError, ValueError."""
        client.sendall(ANSWER.pack(_PAGES, sum(page.nbytes for page in pages)))
        for page in pages:
            client.sendall(page.numpy().data)

    def _read_request(self, client: socket.socket) -> list[bytes]:
        """The names that somebody asks for. Raises Unavailable: pages of this engine are of no use there."""
        magic, digest, size, count = _ASKED.unpack(receive(client, _ASKED.size))
        if magic != MAGIC or not 0 < size <= _MOST_NAME_BYTES or not 0 < count <= _MOST_NAMES:
            raise ValueError("no request for pages came")
        data = receive(client, size * count)
        if digest != self._digest:
            raise Unavailable("it has another model, number type, layout or number of ranks")
        return [bytes(data[start : start + size]) for start in range(0, len(data), size)]

    def _wait_for(self, names: list[bytes]) -> list[torch.Tensor]:
        """The pages; those that are on their way to the host are waited for. Raises Unavailable: one is not there."""
        with self._saved:
            self._saved.wait_for(lambda: self._pending.keys().isdisjoint(names), self._timeout_s)
            missing = sum(name not in self._kept for name in names)
            if missing:
                raise Unavailable(f"it has {len(names) - missing} of {len(names)} pages")
            return [self._kept[name] for name in names]

    # What this engine asks others for.

    def gather(self, names: list[bytes]) -> Pages:
        address, *names = names
        host, port = address.decode().split()
        place = (host, int(port) + self._rank)
        deadline = time.monotonic() + self._timeout_s
        try:
            with socket.create_connection(place, self._timeout_s) as server:
                server.sendall(_ASKED.pack(MAGIC, self._digest, len(names[0]), len(names)) + b"".join(names))
                kind, size = ANSWER.unpack(receive(server, ANSWER.size, deadline))
                if kind == _REASON:
                    raise ValueError(receive(server, min(size, 1000), deadline).decode(errors="replace"))
                return self.take_over(server, kind, size, len(names), deadline)
        except (OSError, ValueError) as error:
            logger.warning("pages of %s:%d cannot be had, and are computed: %s", *place, error)
            raise

    def take_over(self, server: socket.socket, kind: int, size: int, count: int, deadline: float) -> torch.Tensor:
        """So many pages that somebody answers with, [pages, page bytes]. Raises OSError, ValueError."""
        if kind != _PAGES:
            raise ValueError("it does not send pages over TCP; both sides need the same kv_connector")
        if size != count * self.pages.page_bytes:
            raise ValueError(f"it sends {size} bytes for {count} pages of {self.pages.page_bytes}")
        return torch.frombuffer(receive(server, size, deadline), dtype=torch.uint8).view(count, -1)

    def shutdown(self) -> None:
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._server.close()
        self._clients.shutdown(wait=False, cancel_futures=True)
        super().shutdown()


class RowTier(TcpTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`.

    Attributes:
        ticket: what others are told of the memory.
    """

    fills_first = True
    place = torch.device("cpu")
    """Where the memory is."""
    KIND: int
    """Of an answer whose pages travel by this tier's means."""

    ticket = b""

    @abc.abstractmethod
    def lend(self, memory: torch.Tensor) -> bytes:
        """Let others have what is in this memory until the engine ends; the ticket with which they do."""

    def make_rows(self, page_bytes: int, most: int) -> PageRows:
        if self.config.kv_transfer is None or not self.config.kv_transfer.saves:
            return super().make_rows(page_bytes, 0)
        try:
            rows = torch.empty((most, page_bytes), dtype=torch.uint8, device=self.place)
            self.ticket = self.lend(rows)
        except Exception as error:  # the libraries' exceptions have no common base
            text = f"{most * page_bytes >> 20} MiB of memory cannot be lent to others ({error}): lower max_bytes, or raise "
            raise ConfigError(f"{SETTING}: {text}the limit of locked memory", setting=SETTING) from error
        return PageRows(lambda _: rows, most, most)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        text = f"{SETTING}.kv_connector_extra_config.timeout_s={value!r} must be a number of seconds above 0"
        raise ConfigError(text, setting=SETTING)
    return float(value)


def _listen(host: str, port: int) -> socket.socket:
    what = f"{SETTING}: kv_ip={host!r} and kv_port give the address {host}:{port}, which cannot be used"
    with refusing(OSError, setting=SETTING, what=what):
        return socket.create_server((host, port), backlog=64)


def receive(peer: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """So many bytes. Raises TimeoutError, ConnectionError: they do not come."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it takes too long")
            peer.settimeout(left)
        count = peer.recv_into(view[filled : filled + _CHUNK])
        if count == 0:
            raise ConnectionError(f"it ended after {filled} of {size} bytes")
        filled += count
    return data


def while_connected(peer: socket.socket, deadline: float, call: Callable[[], None]) -> None:
    """Do this side's part of a transfer while the other one does its own. A side whose part fails, or that ends, hangs up: the
    other one waits no more, and what it has begun goes on in its thread, unheard. Raises OSError, and what the call raises."""

    def run() -> None:
        call()
        peer.sendall(DONE)

    mine = begin_call(run, "kv-transfer")
    mine.add_done_callback(functools.partial(_hang_up, peer))
    try:
        receive(peer, len(DONE), deadline)
        mine.result(max(0.0, deadline - time.monotonic()))
    except OSError:
        if mine.done():
            mine.result()
        raise


def _hang_up(peer: socket.socket, ended: "concurrent.futures.Future[None]") -> None:
    if ended.exception() is not None:
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)
