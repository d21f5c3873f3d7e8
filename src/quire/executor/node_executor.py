"""Ranks of one engine on several hosts without Ray: `--nnodes`.

The first host has the engine and the first ranks. Each of the others joins it (`host_door.py`), starts its own ranks
(`engine/rank_host.py`), and ends them when the connection ends. Steps go to ranks here through memory, to the others over TCP.
"""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from quire import envs
from quire.codec import decoder, encode
from quire.config import EngineConfig
from quire.errors import ConfigError, EngineDeadError, EngineError
from quire.executor.broadcast_ring import Broadcast, RingWriter
from quire.executor.host_door import HostDoor, Join
from quire.executor.host_link import HostLink
from quire.executor.host_network import beyond_host, free_place
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.rank_processes import RankProcesses
from quire.executor.remote_ranks import MESSAGES, Links, RankDoor, RemoteChild, RemoteRanks
from quire.executor.socket_ring import SocketWriter
from quire.logger import init_logger
from quire.patch import marks
from quire.platforms.interface import WorkerProcess

logger = init_logger(__name__)

SETTINGS = ("master_addr", "master_port")
_CONNECT_S = 60.0
_SHARE_OF_START = 0.9
"""Of the time that a core may take to start: so long other hosts are waited for, so that the error can say who is missing."""


class StartRanks(msgspec.Struct, tag="ranks", array_like=True):
    """The engine's answer to a host that joins.

    Attributes:
        port, token: where and with what its ranks connect.
        places: for each of them, where ranks meet and where stages do.
    """

    port: int
    token: bytes
    places: list[tuple[str, str]]
    patches: list[str]


class Started(msgspec.Struct, array_like=True):
    """A host's processes."""

    pids: list[int]


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True):
    """The engine ends in good order: its hosts may, too."""


class NodeChild(RemoteChild):
    """A rank of another host; that host ends its ranks together."""

    def __init__(self, node: "Node", number: int, links: Links, rank: int) -> None:
        super().__init__(node.pids[number], links, rank)
        self._node = node

    def kill(self) -> None:
        self._node.link.end()

    def describe_exit(self) -> str:
        return f"on {self._node.link.peer} has ended"


class Node:
    """One of the other hosts."""

    def __init__(self, link: HostLink, join: Join) -> None:
        self.link, self.join = link, join
        self.pids: list[int] = []

    def start(self, message: StartRanks) -> None:
        """Have it start its ranks."""
        self.link.send(encode(message))

    def hear(self) -> None:
        """Wait until they are started. Raises EngineError: it is gone."""
        data = self.link.receive()
        if data is None:
            raise EngineError(f"node {self.join.number} ({self.link.peer}) is gone before its ranks were started")
        self.pids = decoder(Started)(data).pids

    def watch(self, children: list[RemoteChild]) -> None:
        """Give its ranks up when it is gone, or silent; in a thread."""

        def wait() -> None:
            while self.link.receive() is not None:
                pass
            for child in children:
                child.lose()

        threading.Thread(target=wait, name="node-watch", daemon=True).start()


class Nodes:
    """All other hosts, with the connections of their ranks.

    Raises:
        ConfigError: the address cannot be used.
        EngineError: they do not come in time.
    """

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self._address, self._count = parallel.master_addr, parallel.workers_per_node
        self.nodes: list[Node] = []
        try:
            self._wait_for_all(config)
            self.meeting_places = self._meeting_places(config)
            self._start_ranks(parallel.tensor_parallel_size)
        except BaseException:
            self.end()
            raise

    def _wait_for_all(self, config: EngineConfig) -> None:
        numbers = range(1, config.parallel.nnodes)
        door = HostDoor(config, (self._address, config.parallel.master_port), SETTINGS, "node", numbers)
        until = time.monotonic() + _SHARE_OF_START * envs.QUIRE_ENGINE_READY_TIMEOUT_S
        try:
            for number in numbers:
                node = Node(*door.take(number, max(0.01, until - time.monotonic())))
                logger.info("node %d of %d has joined from %s", number, config.parallel.nnodes, node.link.peer)
                self.nodes.append(node)
        except EngineDeadError as error:
            raise EngineError(str(error)) from None
        finally:
            door.close()

    def _meeting_places(self, config: EngineConfig) -> list[str]:
        """For each stage on the host of its first rank, and one for the stages."""
        share = config.parallel.tensor_parallel_size
        own = [free_place(self._address) for _ in range(self._count + 1)]
        places = [own[:-1], *(node.join.meeting_places for node in self.nodes)]
        firsts = range(0, config.parallel.world_size, share)
        return [*(places[rank // self._count][rank % self._count] for rank in firsts), own[-1]]

    def _start_ranks(self, share: int) -> None:
        door = RankDoor(self._address)
        for number, node in enumerate(self.nodes, 1):
            ranks = range(number * self._count, (number + 1) * self._count)
            places = [(self.meeting_places[rank // share], self.meeting_places[-1]) for rank in ranks]
            node.start(StartRanks(door.port, door.token, places, marks()))
        self.links = door.accept(len(self.nodes) * self._count, _CONNECT_S)
        self.children: dict[int, RemoteChild] = {}
        for number, node in enumerate(self.nodes, 1):
            node.hear()
            first = number * self._count
            own: list[RemoteChild] = [NodeChild(node, each, self.links, first + each) for each in range(self._count)]
            self.children.update(enumerate(own, first))
            node.watch(own)

    def say_goodbye(self) -> None:
        """What follows is an end in good order."""
        for node in self.nodes:
            node.link.send(encode(Goodbye()))

    def end(self) -> None:
        """Leave all of them; may be called twice."""
        for node in self.nodes:
            node.link.close()


class NodeRanks(RemoteRanks):
    """Ranks here and on other hosts."""

    def __init__(self, nodes: Nodes, *arguments: Any) -> None:
        self._nodes = nodes
        super().__init__(nodes.children, nodes.links, *arguments, nodes.meeting_places)

    def end(self, patience_s: float) -> None:
        super().end(patience_s)
        self._nodes.end()


class NodesRing(RingWriter):
    """Messages through memory for readers of this host, and over connections for the others."""

    def __init__(self, num_readers: int, connections: list[socket.socket]) -> None:
        super().__init__(num_readers)
        self._others = SocketWriter(connections)

    def send(self, message: bytes, give_up: Callable[[], bool]) -> None:
        self._others.send(message, give_up)
        super().send(message, give_up)

    def close(self) -> None:
        self._others.close()
        super().close()


class NodeExecutor(MultiprocExecutor):
    """Runs steps on the ranks of several hosts, of which this is the first one.

    Raises:
        ConfigError: this host is none that has an engine; as `Nodes`.
    """

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        if parallel.node_rank:
            text = f"node_rank={parallel.node_rank}: the engine is on node 0; the others run `quire serve MODEL … --headless`"
            raise ConfigError(text, setting="node_rank")
        self._nodes = Nodes(config)
        if parallel.tensor_parallel_size > parallel.workers_per_node:  # GPUs of other hosts cannot be read
            parallel = dataclasses.replace(parallel, disable_custom_all_reduce=True)
        try:
            super().__init__(dataclasses.replace(config, parallel=parallel))
        except BaseException:
            self._nodes.end()
            raise

    def _open_ring(self) -> Broadcast:
        others = [self._nodes.links[MESSAGES, rank] for rank in self._nodes.children]
        return NodesRing(self.config.parallel.workers_per_node, others)

    def _start_as(self, rank: int) -> WorkerProcess:
        return beyond_host(super()._start_as(rank), socket.gethostbyname(self.config.parallel.master_addr))

    def _make_ranks(self, *arguments: Any) -> RankProcesses:
        return NodeRanks(self._nodes, *arguments)

    def shutdown(self, patience_s: float = 5.0) -> None:
        if patience_s > 0 and not self._is_shut_down and self._processes.failure is None:
            self._nodes.say_goodbye()
        super().shutdown(patience_s)
