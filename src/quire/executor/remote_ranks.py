"""Ranks on other hosts: where they connect, twice each, what stands for their processes here, and how such a process serves.

One connection has messages, as memory and a pipe do for ranks of this host; the other one ends with the process, and has its last
words. Whoever places ranks (`ray_executor.py`, `node_executor.py`) knows how they are started and ended.
"""

import abc
import contextlib
import hmac
import os
import secrets
import socket
import time
from typing import Any, NoReturn

from quire import faults
from quire.errors import EngineError
from quire.executor.host_link import MAX_MESSAGE_BYTES
from quire.executor.rank_processes import Rank, RankProcesses
from quire.executor.socket_ring import SocketReader
from quire.logger import set_process_label
from quire.platforms.interface import WorkerProcess
from quire.processes import begin_child, name_process

MESSAGES, LIFE = b"m", b"l"
_TOKEN_BYTES = 32
_GREETING_BYTES = _TOKEN_BYTES + 1 + 4
_CONNECT_S = 60.0
Links = dict[tuple[bytes, int], socket.socket]


class RankDoor:
    """Listens for ranks that know a token.

    Args:
        host: the address to listen at; empty: all of this host's.
    """

    def __init__(self, host: str = "") -> None:
        self._server = socket.create_server((host, 0))
        self.port = int(self._server.getsockname()[1])
        self.token = secrets.token_bytes(_TOKEN_BYTES)

    def accept(self, count: int, patience_s: float) -> Links:
        """Both connections of so many ranks. Raises EngineError: they do not come in time."""
        links: Links = {}
        until = time.monotonic() + patience_s
        with self._server:
            while len(links) < 2 * count:
                self._server.settimeout(max(0.01, until - time.monotonic()))
                try:
                    link, _ = self._server.accept()
                except TimeoutError:
                    text = f"ranks on other hosts have not reached the engine's process within {patience_s:.0f} s"
                    raise EngineError(text) from None
                if (key := self._read_greeting(link)) is not None:
                    links[key] = link
        return links

    def _read_greeting(self, link: socket.socket) -> tuple[bytes, int] | None:
        link.settimeout(_CONNECT_S)
        greeting = b""
        with contextlib.suppress(OSError):
            greeting = link.recv(_GREETING_BYTES, socket.MSG_WAITALL)
        if len(greeting) < _GREETING_BYTES or not hmac.compare_digest(greeting[:_TOKEN_BYTES], self.token):
            link.close()  # somebody else
            return None
        _make_line(link)
        return greeting[_TOKEN_BYTES : _TOKEN_BYTES + 1], int.from_bytes(greeting[_TOKEN_BYTES + 1 :], "big")


def connect(engine: tuple[str, int], token: bytes, rank: int) -> tuple[socket.socket, socket.socket]:
    """A rank's two connections to the engine: for messages, and for its life."""
    lines: list[socket.socket] = []
    for kind in (MESSAGES, LIFE):
        line = socket.create_connection(engine, _CONNECT_S)
        _make_line(line)
        line.sendall(token + kind + rank.to_bytes(4, "big"))
        lines.append(line)
    return lines[0], lines[1]


def _make_line(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class RemoteChild(abc.ABC):
    """One rank's process, with the interface of `quire.processes.Child` as far as ranks need it."""

    def __init__(self, pid: int, links: Links, rank: int) -> None:
        self.pid = pid
        self._lines = [links[MESSAGES, rank], links[LIFE, rank]]
        self.life_fd = self._lines[1].fileno()

    @property
    def process(self) -> "RemoteChild":
        """Itself."""
        return self

    @abc.abstractmethod
    def kill(self) -> None:
        """End it by force; may be called twice."""

    @abc.abstractmethod
    def describe_exit(self) -> str:
        """How it ended."""

    def wait(self, timeout: float | None = None) -> None:
        """Its host waits."""

    def lose(self) -> None:
        """Its host is gone: nothing will come, and nothing can be said."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def end(self, patience_s: float) -> None:
        """Wait until it has ended, but not longer than `patience_s`; end it by force then."""
        life = self._lines[1]
        life.settimeout(max(0.01, patience_s))
        with contextlib.suppress(OSError):
            while life.recv(1 << 16):
                pass
        self.kill()

    def close(self) -> None:
        """Close this process's end."""
        self._lines[1].close()


class RemoteRanks(RankProcesses):
    """Ranks of which some are on other hosts, watched as processes of this host are.

    Args:
        children: those of other hosts, by rank.
        links: their connections.
        arguments: of `RankProcesses`.
    """

    def __init__(self, children: dict[int, RemoteChild], links: Links, *arguments: Any) -> None:
        self._children, self._links = children, links
        super().__init__(*arguments)

    def _spawn(self, rank: int, options: WorkerProcess) -> Rank:
        if rank not in self._children:
            return super()._spawn(rank, options)
        return Rank(self._children[rank], os.dup(self._links[MESSAGES, rank].fileno()))


def serve_rank(
    rank: int, addresses: tuple[str, str], messages: socket.socket, life: socket.socket, model_path: str | None = None
) -> NoReturn:
    """Be a rank until the engine says that this is the end; the process ends with it."""
    from quire.executor.worker_process import WorkerProcess

    set_process_label(f"rank {rank}")
    faults.begin_process(f"rank {rank}")
    reader = SocketReader(messages, MAX_MESSAGE_BYTES)
    WorkerProcess(rank, addresses, reader, messages.fileno(), life.fileno(), model_path).run()


def main(arguments: list[str]) -> NoReturn:
    """Entry of a child process of another host than the engine's: rank, descriptors of both connections, where ranks and stages
    meet, and the folder of the model on this host."""
    (rank, messages, life, *addresses, model_path), _ = begin_child(arguments)
    name_process(f"quire rank {rank}")
    lines = [socket.socket(fileno=int(descriptor)) for descriptor in (messages, life)]
    serve_rank(int(rank), (addresses[0], addresses[1]), lines[0], lines[1], model_path)
