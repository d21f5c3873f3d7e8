"""Ranks on the nodes of a Ray cluster: `distributed_executor_backend="ray"`.

Ray places one actor for each rank (a placement group with a device each) and ends it. Everything else is as with ranks of this
host (`multiproc.py`), over TCP: the same messages, the same watch over lives. Knows Ray's interface; knows nothing of steps.
"""

import dataclasses
import importlib
from typing import Any

from quire import envs
from quire.config import EngineConfig, ParallelConfig
from quire.errors import ConfigError
from quire.executor.host_network import beyond_host
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.rank_processes import RankProcesses
from quire.executor.ray import initialize_ray_cluster
from quire.executor.ray_rank import RayRank
from quire.executor.remote_ranks import MESSAGES, RankDoor, RemoteChild, RemoteRanks
from quire.executor.socket_ring import SocketWriter
from quire.logger import init_logger
from quire.platforms import current_platform

logger = init_logger(__name__)

SETTING = "distributed_executor_backend"
PLACE_S = 120.0
"""How long Ray may take to find room for the ranks, and these to answer."""


class RayActors:
    """One actor for each rank, with its two connections.

    Raises:
        ConfigError: Ray is not there, or has no room.
    """

    def __init__(self, config: EngineConfig) -> None:
        initialize_ray_cluster(config.parallel)
        self.ray: Any = importlib.import_module("ray")
        self.group: Any = None
        self.actors: list[Any] = []
        try:
            self._place(config)
            self._meet(config.parallel)
        except BaseException:
            self.end()
            raise

    def _place(self, config: EngineConfig) -> None:
        size, platform = config.parallel.world_size, current_platform(config.device.device)
        on_host = platform.capabilities().computes_on_host.value
        needs = {"CPU": 1} if on_host else {"GPU": 1, "CPU": 1}
        util: Any = importlib.import_module("ray.util")
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        self.group = util.placement_group([needs] * size, strategy="PACK")
        if not self.group.wait(PLACE_S):
            text = f"the Ray cluster has no room for {size} ranks with {needs} each (it has {self.ray.cluster_resources()})"
            raise ConfigError(text, setting=SETTING)
        variables = envs.relevant_environment() | {"PYTHONPATH": envs.foreign("PYTHONPATH") or ""}
        actor = self.ray.remote(RayRank)
        for rank in range(size):
            where = strategies.PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=rank
            )
            words = {**variables, **beyond_host(platform.worker_process(config, rank)).environment}
            made = actor.options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                scheduling_strategy=where,
                max_restarts=0,
                runtime_env={"env_vars": words},
            ).remote()
            self.actors.append(made)

    def _meet(self, parallel: ParallelConfig) -> None:
        """Have each actor connect to this process, twice: for messages, and for its life."""
        calls = [actor.pid.remote() for actor in self.actors]
        self.pids: list[int] = self.ray.get(calls, timeout=PLACE_S)
        share = parallel.tensor_parallel_size
        firsts = [*self.actors[::share], self.actors[0]]  # of each stage, and where stages meet
        places = self.ray.get([first.meeting_place.remote() for first in firsts], timeout=PLACE_S)
        util: Any = importlib.import_module("ray.util")
        door = RankDoor()
        for rank, actor in enumerate(self.actors):
            engine, meeting = (str(util.get_node_ip_address()), door.port), (places[rank // share], places[-1])
            actor.run.remote(rank, engine, door.token, meeting)
        self.links = door.accept(parallel.world_size, PLACE_S)

    def end(self) -> None:
        """Give all of it back to Ray; may be called twice."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors = []
        if self.group is not None:
            importlib.import_module("ray.util").remove_placement_group(self.group)
            self.group = None


class RayChild(RemoteChild):
    """One actor."""

    def __init__(self, actors: RayActors, rank: int) -> None:
        super().__init__(actors.pids[rank], actors.links, rank)
        self._ray, self._actor = actors.ray, actors.actors[rank]

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def describe_exit(self) -> str:
        return "on a node of Ray has ended"


class RayRanks(RemoteRanks):
    """All actors."""

    def __init__(self, actors: RayActors, *arguments: Any) -> None:
        self._actors = actors
        children = {rank: RayChild(actors, rank) for rank in range(len(actors.actors))}
        super().__init__({**children}, actors.links, *arguments)

    def end(self, patience_s: float) -> None:
        super().end(patience_s)
        self._actors.end()


class RayExecutor(MultiprocExecutor):
    """Runs steps on actors of Ray.

    Raises:
        ConfigError: Ray is not there or has no room.
    """

    name = "ray"

    def __init__(self, config: EngineConfig) -> None:
        self._actors = RayActors(config)
        parallel = dataclasses.replace(config.parallel, device_index=0)  # Ray shows each actor its own device alone
        super().__init__(dataclasses.replace(config, parallel=parallel))

    def _open_ring(self) -> SocketWriter:
        links = self._actors.links
        return SocketWriter([links[MESSAGES, rank] for rank in range(self._size)])

    def _make_ranks(self, *arguments: Any) -> RankProcesses:
        return RayRanks(self._actors, *arguments)
