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
from quire.config.engine import SharingCopies
from quire.engine import messages
from quire.engine.core_client import CoreClient
from quire.engine.core_loop import last_words
from quire.engine.data_parallel import config_of_copy
from quire.engine.nodes import SETTINGS, place_of_head
from quire.engine.process_client import ProcessClient, open_seated
from quire.engine.shared_copies import CopySeat, Gathering
from quire.engine.spare_core import SpareCores, wants_spare
from quire.engine.weights import fetch_missing_weights
from quire.errors import ConfigError, QuireError
from quire.executor.host_door import Join, ask, shared_settings, visit
from quire.executor.host_link import HostLink
from quire.executor.host_network import free_place
from quire.logger import init_logger
from quire.version import __version__

logger = init_logger(__name__)


_PATIENCE_S = 10.0
"""How long the others of a host's copies may take to end behind the first one."""

Incoming = queue.SimpleQueue[messages.FrontendMessage | None]
"""What the head node has said; None behind the last."""


class HeadlessCopy:
    """One of this host's copies."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self._config, self._number = config, parallel.copy_number
        self._spares = SpareCores() if wants_spare(config) else None

    def run(self) -> None:
        """Serve until the head node ends.
        Raises ConfigError: the head node, or the core, refuses the configuration.
        Raises EngineDeadError: there is no head node."""
        visit(place_of_head(self._config), SETTINGS, self._serve)

    def _serve(self, link: HostLink) -> bool:
        """Join, and run a core until it or the head node ends; whether to join again."""
        join = Join(self._number, __version__, shared_settings(self._config), [free_place(link.address)])
        answer = ask(link, join, messages.Start)
        if answer is None:
            return True
        gathering, came = Gathering(lambda: answer.rendezvous, 1), Incoming()
        gathering.seats[0].spares = self._spares
        arguments = link, came, gathering
        threading.Thread(target=_listen, args=arguments, name="headless-listener", daemon=True).start()
        client: CoreClient | None = None
        try:
            client = self._start_core(link, answer, gathering.seats[0])
        except QuireError as error:
            link.send(encode(last_words(error)))
            if isinstance(error, ConfigError):
                raise
            logger.error("copy %d: %s", self._number, error)
        try:
            return self._relay(came, client)
        finally:
            link.close()  # first: the end of this core is not a death
            if client is not None:
                client.shutdown()

    def _start_core(self, link: HostLink, start: messages.Start, seat: CopySeat) -> CoreClient:
        def tell(message: messages.CoreMessage) -> None:
            link.send(encode(message))
            if isinstance(message, messages.Dead):
                link.end()

        parallel = self._config.parallel
        if start.rendezvous:
            sharing = SharingCopies("", self._number, parallel.copies_everywhere, link.address)
            client = open_seated(seat, self._config, sharing, tell, start.standing)
        else:
            client = ProcessClient(self._config, tell, start.standing, spares=self._spares)
        link.send(encode(client.ready))
        logger.info("copy %d serves the head node at %s", self._number, link.peer)
        return client

    def _relay(self, came: Incoming, client: CoreClient | None) -> bool:
        """Give the core, if there is one, what the head node says, until the connection ends; whether to join again."""
        while (message := came.get()) is not None:
            if isinstance(message, messages.Shutdown):
                return False
            if client is not None:
                client.send(message)
        logger.warning("copy %d is no longer connected to its head node, and joins it again", self._number)
        return True


def _listen(link: HostLink, came: Incoming, gathering: Gathering) -> None:
    """Take in what the head node says. Behind that a core that shares experts is of no use if it only starts, or if the
    connection was lost."""
    decode, message = messages.decoder_at_core(), None
    while not isinstance(message, messages.Shutdown) and (data := link.receive()) is not None:
        came.put(message := decode(data))
    gathering.close()
    if not isinstance(message, messages.Shutdown):
        gathering.seats[0].kill()
    came.put(None)


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
    fetch_missing_weights(config)  # before a head node waits
    copies = [HeadlessCopy(config_of_copy(config, number)) for number in range(config.parallel.data_parallel_size)]
    for copy in copies:
        threading.Thread(target=run, args=(copy,), name="headless-copy", daemon=True).start()
    for number in range(len(copies)):
        try:
            error = ends.get(timeout=_PATIENCE_S if number else None)
        except queue.Empty:  # it looks for a head node that, as the first one was told, has ended
            return
        if error is not None:
            raise error
