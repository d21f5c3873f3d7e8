"""A host that has no engine and no API server, but some ranks of another host's engine: `--nnodes … --node-rank … --headless`.

It joins that host, starts its ranks, and ends them when the connection ends. Then it joins again: the engine that lost ranks is
started anew, and waits for all its hosts.
"""

import signal
import sys

from quire.codec import decoder, encode
from quire.config import EngineConfig
from quire.engine.weights import fetch_missing_weights
from quire.envs import with_defaults
from quire.executor.host_door import Join, ask, shared_settings, visit
from quire.executor.host_link import HostLink
from quire.executor.host_network import beyond_host, free_place
from quire.executor.node_executor import SETTINGS, Goodbye, Started, StartRanks
from quire.executor.remote_ranks import connect
from quire.logger import init_logger
from quire.platforms import current_platform
from quire.processes import Child
from quire.version import __version__

logger = init_logger(__name__)

_PATIENCE_S = 5.0
"""How long ranks may take to end in good order."""


class RankHost:
    """This host's ranks."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._place = (config.parallel.master_addr, config.parallel.master_port)
        fetch_missing_weights(config)

    def run(self) -> None:
        """Serve until the engine ends in good order.
        Raises ConfigError: the engine refuses this host.
        Raises EngineDeadError: there is no engine."""
        visit(self._place, SETTINGS, self._serve)

    def _serve(self, link: HostLink) -> bool:
        """Join, and have ranks until the connection ends; whether to join again."""
        parallel = self._config.parallel
        places = [free_place(link.address) for _ in range(parallel.workers_per_node)]
        join = Join(parallel.node_rank, __version__, shared_settings(self._config), places)
        if (answer := ask(link, join, StartRanks)) is None:
            return True
        children: list[Child] = []
        is_over = False
        try:
            children.extend(self._start_rank(link, answer, number) for number in range(parallel.workers_per_node))
            link.send(encode(Started([child.pid for child in children])))
            logger.info("node %d has joined the engine at %s", parallel.node_rank, link.peer)
            while (data := link.receive()) is not None:
                is_over = bool(decoder(Goodbye)(data)) or is_over
        finally:
            for child in children:
                child.end(_PATIENCE_S if is_over else 0.0)
                child.close()
        if not is_over:
            logger.warning("node %d has lost its engine, and looks for it", parallel.node_rank)
        return not is_over

    def _start_rank(self, link: HostLink, message: StartRanks, number: int) -> Child:
        parallel = self._config.parallel
        rank = parallel.node_rank * parallel.workers_per_node + number
        lines = connect((link.peer, message.port), message.token, rank)
        try:
            descriptors = [line.fileno() for line in lines]
            words = [*map(str, (rank, *descriptors)), *message.places[number], self._config.model.path]
            platform = current_platform(self._config.device.device)
            process = beyond_host(platform.worker_process(self._config, rank), link.address)
            environment = with_defaults(process.environment)
            return Child("quire.executor.remote_ranks:main", words, descriptors, environment, kind="worker")
        finally:
            for line in lines:
                line.close()


def serve_ranks(config: EngineConfig) -> None:
    """Have ranks for an engine until it ends, or a signal ends this process, and its ranks with it.
    Raises ConfigError, EngineDeadError: it does not serve."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    RankHost(config).run()
