"""A host without an API server: it runs some of the model's copies for a head node, which it joins.

Each copy has a connection of its own to the head node, and an engine core in a child process for as long as the connection lasts.
When either ends, the copy joins again with a fresh core; the head node tells it how it shall stand.
"""

import queue
import signal
import sys
import threading

from quire.codec import encode
from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.core_loop import last_words
from quire.engine.data_parallel import config_of_copy
from quire.engine.nodes import SETTINGS, place_of_head
from quire.engine.process_client import ProcessClient
from quire.engine.spare_core import SpareCores, wants_spare
from quire.errors import ConfigError, QuireError
from quire.executor.host_door import Join, ask, shared_settings, visit
from quire.executor.host_link import HostLink
from quire.logger import init_logger
from quire.version import __version__

logger = init_logger(__name__)


class HeadlessCopy:
    """One of this host's copies."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self._config, self._number = config, parallel.copy_number
        self._spares = SpareCores() if wants_spare(config) else None
        self._core_died = False

    def run(self) -> None:
        """Serve until the head node ends.
        Raises ConfigError: the head node, or the core, refuses the configuration.
        Raises EngineDeadError: there is no head node."""
        visit(place_of_head(self._config), SETTINGS, self._serve)

    def _serve(self, link: HostLink) -> bool:
        """Join, and run a core until it or the head node ends; whether to join again."""
        answer = ask(link, Join(self._number, __version__, shared_settings(self._config)), messages.Start)
        if answer is None:
            return True
        try:
            client = self._start_core(link, answer.standing)
        except QuireError as error:
            link.send(encode(last_words(error)))
            if isinstance(error, ConfigError):
                raise
            logger.error("copy %d: %s", self._number, error)
            return True
        try:
            return self._relay(link, client)
        finally:
            link.close()  # first: the end of this core is not a death
            client.shutdown()

    def _start_core(self, link: HostLink, standing: messages.Standing | None) -> ProcessClient:
        self._core_died = False

        def tell(message: messages.CoreMessage) -> None:
            link.send(encode(message))
            if isinstance(message, messages.Dead):
                self._core_died = True
                link.end()

        client = ProcessClient(self._config, tell, standing, spares=self._spares)
        link.send(encode(client.ready))
        logger.info("copy %d serves the head node at %s", self._number, link.peer)
        return client

    def _relay(self, link: HostLink, client: ProcessClient) -> bool:
        """Give the core what the head node says, until that ends; whether to join again."""
        decode = messages.decoder_at_core()
        while (data := link.receive()) is not None:
            message = decode(data)
            if isinstance(message, messages.Shutdown):
                return self._core_died
            client.send(message)
        logger.warning("copy %d has lost its head node, and looks for it", self._number)
        return True


def serve_headless(config: EngineConfig) -> None:
    """Run this host's copies until the head node ends, or a signal ends this process, and its cores with it.
    Raises ConfigError, EngineDeadError: one of them cannot serve."""
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(copy: HeadlessCopy) -> None:
        try:
            ends.put(copy.run())
        except BaseException as error:  # raised in the main thread
            ends.put(error)

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    copies = [HeadlessCopy(config_of_copy(config, number)) for number in range(config.parallel.data_parallel_size)]
    for copy in copies:
        threading.Thread(target=run, args=(copy,), name="headless-copy", daemon=True).start()
    for _ in copies:
        if (error := ends.get()) is not None:
            raise error
