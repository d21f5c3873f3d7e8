"""A rank as an actor of Ray: the other side of `RayExecutor`.

Ray places it. Messages go over connections of its own to the engine, as those of a rank of this host go through memory and pipes.
"""

import importlib
import os
import socket
from typing import Any, NoReturn

from quire.patch import bootstrap

CONNECT_S = 60.0


class RayRank:
    """What Ray makes an actor of. It begins as every worker process does, before what can be patched is imported."""

    def __init__(self) -> None:
        bootstrap("worker")

    def meeting_place(self) -> str:
        """An address on this node at which ranks can meet."""
        host = self.node()
        with socket.socket() as found:
            found.bind(("", 0))
            return f"tcp://{host}:{found.getsockname()[1]}"

    def node(self) -> str:
        """This node's address."""
        util: Any = importlib.import_module("ray.util")  # only in an actor
        return str(util.get_node_ip_address())

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def run(self, rank: int, engine: tuple[str, int], token: bytes, rendezvous: str) -> NoReturn:
        """Serve the engine until it says that this is the end; the process ends with it."""
        from quire import faults
        from quire.executor.socket_ring import SocketReader
        from quire.executor.worker_process import WorkerProcess
        from quire.logger import set_process_label

        messages, life = (_connect(engine, token, rank, kind) for kind in (b"m", b"l"))
        set_process_label(f"rank {rank}")
        faults.begin_process(f"rank {rank}")
        reader = SocketReader(messages)
        WorkerProcess(rank, (rendezvous, ""), reader, messages.fileno(), life.fileno()).run()


def _connect(engine: tuple[str, int], token: bytes, rank: int, kind: bytes) -> socket.socket:
    connection = socket.create_connection(engine, CONNECT_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token + kind + rank.to_bytes(4, "big"))
    return connection
