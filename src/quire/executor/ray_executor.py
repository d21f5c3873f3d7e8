"""Ranks on the nodes of a Ray cluster: `distributed_executor_backend="ray"`.

Ray places one actor for each rank (a placement group with a device each) and ends it. Everything else is as with ranks of this
host (`multiproc.py`), over TCP: the same messages, the same watch over lives. Knows Ray's interface; knows nothing of steps.
"""

import dataclasses
import functools
import hmac
import importlib
import secrets
import socket
import weakref
from typing import Any

from quire import envs
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.rank_processes import Rank, RankProcesses
from quire.executor.ray import initialize_ray_cluster
from quire.executor.ray_rank import RayRank
from quire.executor.socket_ring import SocketWriter, duplicate
from quire.logger import init_logger
from quire.platforms import current_platform
from quire.platforms.interface import WorkerProcess

logger = init_logger(__name__)

SETTING = "distributed_executor_backend"
PLACE_S = 120.0
"""How long Ray may take to find room for the ranks, and these to answer."""
_TOKEN_BYTES = 32
_GREETING_BYTES = _TOKEN_BYTES + 1 + 4


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
            self._meet(config.parallel.world_size)
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
            words = {**variables, **_settings_of(platform.worker_process(config, rank))}
            made = actor.options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                scheduling_strategy=where,
                max_restarts=0,
                runtime_env={"env_vars": words},
            ).remote()
            self.actors.append(made)

    def _meet(self, size: int) -> None:
        """Have each actor connect to this process, twice: for messages, and for its life."""
        calls = [actor.pid.remote() for actor in self.actors]
        self.pids: list[int] = self.ray.get(calls, timeout=PLACE_S)
        rendezvous = self.ray.get(self.actors[0].meeting_place.remote(), timeout=PLACE_S)
        util: Any = importlib.import_module("ray.util")
        token, self.links = secrets.token_bytes(_TOKEN_BYTES), dict[tuple[bytes, int], socket.socket]()
        with socket.create_server(("", 0)) as server:
            server.settimeout(PLACE_S)
            engine = (str(util.get_node_ip_address()), server.getsockname()[1])
            for rank, actor in enumerate(self.actors):
                actor.run.remote(rank, engine, token, rendezvous)
            while len(self.links) < 2 * size:
                self._accept(server, token)

    def _accept(self, server: socket.socket, token: bytes) -> None:
        try:
            link, _ = server.accept()
        except TimeoutError:
            raise ConfigError("the ranks on Ray's nodes do not reach the engine's process", setting=SETTING) from None
        link.settimeout(PLACE_S)
        greeting = link.recv(_GREETING_BYTES, socket.MSG_WAITALL)
        if len(greeting) < _GREETING_BYTES or not hmac.compare_digest(greeting[:_TOKEN_BYTES], token):
            link.close()  # somebody else
            return
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind, rank = greeting[_TOKEN_BYTES : _TOKEN_BYTES + 1], int.from_bytes(greeting[_TOKEN_BYTES + 1 :], "big")
        self.links[kind, rank] = link

    def end(self) -> None:
        """Give all of it back to Ray; may be called twice."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors = []
        if self.group is not None:
            importlib.import_module("ray.util").remove_placement_group(self.group)
            self.group = None


def _settings_of(process: WorkerProcess) -> dict[str, str]:
    """A rank's variables, but for those that keep it to one host's loopback device."""
    return {name: value for name, value in process.environment.items() if not name.endswith("_SOCKET_IFNAME")}


class RayChild:
    """One actor, with the interface of `quire.processes.Child` as far as ranks need it."""

    def __init__(self, actors: RayActors, rank: int) -> None:
        self._ray, self._actor = actors.ray, actors.actors[rank]
        self._life = actors.links[b"l", rank]
        self.pid, self.life_fd = actors.pids[rank], self._life.fileno()

    @property
    def process(self) -> "RayChild":
        """Itself."""
        return self

    def kill(self) -> None:
        """End it by force."""
        self._ray.kill(self._actor)

    def wait(self, timeout: float | None = None) -> None:
        """Ray waits."""

    def end(self, patience_s: float) -> None:
        """Wait until it has ended, but not longer than `patience_s`; end it by force then."""
        self._life.settimeout(max(0.01, patience_s))
        try:
            while self._life.recv(1 << 16):
                pass
        except OSError:
            pass
        self.kill()

    def describe_exit(self) -> str:
        """How it ended."""
        return "on a node of Ray has ended"

    def close(self) -> None:
        """Close this process's end."""
        self._life.close()


class RayRanks(RankProcesses):
    """The actors, watched as processes of this host are."""

    def __init__(self, actors: RayActors, *arguments: Any) -> None:
        self._actors = actors
        super().__init__(*arguments)

    def _spawn(self, rank: int, size: int, options: WorkerProcess) -> Rank:
        return Rank(RayChild(self._actors, rank), duplicate(self._actors.links[b"m", rank]))

    def end(self, patience_s: float) -> None:
        super().end(patience_s)
        self._actors.end()


class RayExecutor(MultiprocExecutor):
    """Runs steps on actors of Ray.

    Raises:
        ConfigError: Ray is not there or has no room, or stages were asked for.
    """

    name = "ray"

    def __init__(self, config: EngineConfig) -> None:
        if config.parallel.pipeline_parallel_size > 1:
            text = "pipeline_parallel_size does not go with distributed_executor_backend='ray' yet: use tensor_parallel_size"
            raise ConfigError(text, setting="pipeline_parallel_size")
        self._actors = RayActors(config)
        parallel = dataclasses.replace(config.parallel, device_index=0)  # Ray shows each actor its own device alone
        super().__init__(dataclasses.replace(config, parallel=parallel))

    def _open_ring(self) -> SocketWriter:
        links = self._actors.links
        return SocketWriter([links[b"m", rank] for rank in range(self._size)])

    def _start_ranks(self) -> RankProcesses:
        start_as = functools.partial(current_platform(self.config.device.device).worker_process, self.config)
        told = self._tell_of_failure(weakref.ref(self))
        return RayRanks(self._actors, self._size, self._share, self._ring, start_as, told)
