"""A rank as an actor of Ray: the other side of `RayExecutor`.

Ray places it. Messages go over connections of its own to the engine, as those of a rank of this host go through memory and pipes.
"""

import importlib
import os
from typing import Any, NoReturn

from quire.patch import bootstrap


class RayRank:
    """What Ray makes an actor of. It begins as every worker process does, before what can be patched is imported."""

    def __init__(self) -> None:
        bootstrap("worker")

    def meeting_place(self) -> str:
        """An address on this node at which ranks can meet."""
        from quire.executor.host_network import free_place

        util: Any = importlib.import_module("ray.util")  # only in an actor
        return free_place(str(util.get_node_ip_address()))

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def run(self, rank: int, engine: tuple[str, int], token: bytes, meeting: tuple[str, str]) -> NoReturn:
        """Serve the engine until it says that this is the end; the process ends with it."""
        from quire.executor.remote_ranks import connect, serve_rank

        serve_rank(rank, meeting, *connect(engine, token, rank))
