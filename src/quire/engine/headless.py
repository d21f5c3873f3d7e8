"""A host without an API server: it runs some of the model's copies for a head node, which it joins.

Each copy has a connection of its own to the head node, and an engine core in a child process for as long as the connection lasts.
When either ends, the copy joins again with a fresh core; the head node tells it how it shall stand.
"""

import queue
import signal
import socket
import sys
import threading
import time
from typing import Any

from quire import envs
from quire.codec import decoder, encode
from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.core_loop import last_words
from quire.engine.data_parallel import config_of_copy
from quire.engine.host_link import HostLink
from quire.engine.nodes import Join, shared_settings
from quire.engine.process_client import ProcessClient
from quire.engine.spare_core import SpareCores, wants_spare
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.logger import init_logger
from quire.patch import check_same
from quire.version import __version__

logger = init_logger(__name__)

_KNOCK_S = 1.0
"""How long a copy waits before it looks for its head node again."""


class HeadlessCopy:
    """One of this host's copies."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self._config, self._number = config, parallel.copy_number
        self._place = (parallel.data_parallel_address, parallel.data_parallel_rpc_port)
        self._spares = SpareCores() if wants_spare(config) else None
        self._core_died = False

    def run(self) -> None:
        """Serve until the head node ends.
        Raises ConfigError: the head node, or the core, refuses the configuration.
        Raises EngineDeadError: there is no head node."""
        goes_on = True
        while goes_on:
            link = self._connect()
            try:
                goes_on = self._serve(link)
            finally:
                link.close()

    def _connect(self) -> HostLink:
        patience_s = envs.QUIRE_ENGINE_READY_TIMEOUT_S
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return HostLink(socket.create_connection(self._place, _KNOCK_S))
            except OSError as error:
                if time.monotonic() > deadline:
                    place = ":".join(map(str, self._place))
                    text = f"no head node at {place} (data_parallel_address, data_parallel_rpc_port) within {patience_s:.0f} s"
                    raise EngineDeadError(f"{text}: {error}") from error
                time.sleep(_KNOCK_S)

    def _serve(self, link: HostLink) -> bool:
        """Join, and run a core until it or the head node ends; whether to join again."""
        link.send(encode(Join(self._number, __version__, shared_settings(self._config))))
        if (data := link.receive()) is None:
            return True
        answer: Any = decoder(messages.Start | messages.Dead)(data)
        if isinstance(answer, messages.Dead):
            raise ConfigError(answer.message, setting=answer.setting)
        check_same(answer.patches, "the head node")
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
