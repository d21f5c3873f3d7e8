"""An engine core in a process of its own that is started again when it dies, so that its requests go on.

The client watches the core. Each frontend has the journal: prompt, parameters, seed and tokens so far of its requests
(`RequestRecord`). It sends them to the new core; `Suspects` says which of them may run.
"""

import collections
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.messages import (
    AddRequests,
    CoreMessage,
    Dead,
    FrontendMessage,
    GivenUp,
    Outputs,
    Restarted,
    Restarting,
    Standing,
)
from quire.engine.spare_core import SpareCores
from quire.engine.suspects import Suspects
from quire.errors import QuireError
from quire.logger import init_logger

logger = init_logger(__name__)

MAX_FRUITLESS_RESTARTS = 10
FRUITLESS_WITHIN_S = 60.0
"""A core that dies so often within so many seconds, and gave nothing before, stays dead: what kills it will not go away."""

MAX_RESTARTS = 100
WITHIN_S = 600.0
"""The same for cores that gave something."""

StartCore = Callable[[OnMessage, Standing | None], CoreClient]
"""Starts a core that calls what it is given with its messages, and that stands as the dead one whose place it takes, if any."""


class RecoveringClient(CoreClient):
    """A core that is started again when it has ended by itself. It pauses, sleeps and has changed weights as the old one.

    Args:
        start: starts a core.
        on_message: gets the messages of all cores; between two of them `Restarting`, `GivenUp` for a request that is at fault,
            and then `Restarted`: all unfinished requests are to be sent again. `Dead` is the end.
        source: what keeps a process for the next core; it is closed when this client ends.

    Raises:
        ConfigError, EngineDeadError: the first core does not start.
    """

    shares_memory = False

    def __init__(self, start: StartCore, on_message: OnMessage, source: SpareCores | None = None) -> None:
        self._start, self.source = start, source
        self._on_message = on_message
        self._limits = _Limit(MAX_FRUITLESS_RESTARTS, FRUITLESS_WITHIN_S), _Limit(MAX_RESTARTS, WITHIN_S)
        self._is_ending = self._gave_something = self._is_down = False
        self._num_deaths = 0
        self._standing = Standing()
        self._suspects = Suspects()
        self._sending = threading.Lock()  # held where requests are sent: those that were held back keep their order
        self._changing = threading.Lock()  # held while a core is started in another's place
        self._client = start(self._heard, None)
        self.ready = self._client.ready

    # --- from the core, in the thread that listens to it ---

    def _heard(self, message: CoreMessage) -> None:
        match message:
            case Outputs(outputs=outputs):
                self._gave_something = True
                if outputs.weights is not None:
                    self._standing = msgspec.structs.replace(self._standing, weights=outputs.weights)
                self._on_message(message)
                if self._suspects.is_watching:
                    with self._sending:
                        self._send_all(self._suspects.saw(outputs))
            case Standing():
                self._standing = msgspec.structs.replace(message, weights=self._standing.weights)
            case Dead() if not self._is_ending:
                if threading.main_thread().is_alive():  # else the interpreter ends, and has closed what it was heard by
                    self._lose(message)
            case _:
                self._on_message(message)

    def _lose(self, death: Dead) -> None:
        """The core has died: another one is started, in a thread: this one belongs to the dead one's client."""
        if not (death.is_gone or death.is_blameless) and (why := self._refuses_restart()) is not None:
            self._on_message(Dead(f"{death.message}; {why}"))
            return
        what = "is lost until a host joins again" if death.is_gone else "died and is started again"
        logger.error("the engine core %s; its requests go on: %s", what, death.message)
        with self._sending:
            self._num_deaths += 1
            self._is_down = True
            self._on_message(Restarting(death.message, is_gone=death.is_gone))
            if death.is_gone or death.is_blameless:  # so are its requests
                self._suspects = Suspects()
            elif culprit := self._suspects.core_died():
                self._gave_something = True  # who is at fault
                self._on_message(GivenUp(culprit, death.message))
        threading.Thread(target=self._restart, name="engine-core-restart", daemon=True).start()

    def _refuses_restart(self) -> str | None:
        """Note that a core has died; why no other one is started, if so."""
        fruitless, any_kind = self._limits
        limits = (any_kind,) if self._gave_something else (fruitless, any_kind)
        self._gave_something = False
        return next((why for limit in limits if (why := limit.exceeded()) is not None), None)

    # --- restarting ---

    def _restart(self) -> None:
        began, num_deaths = time.monotonic(), self._num_deaths
        with self._changing:
            self._client.shutdown()
            while not self._is_ending:
                try:
                    self._client = self._start(self._heard, self._standing)
                    break
                except QuireError as error:
                    if self._is_ending:
                        return
                    if (why := self._refuses_restart()) is not None:
                        self._on_message(Dead(f"the engine core could not be started again: {error}; {why}"))
                        return
                    logger.error("the engine core could not be started again, and is tried once more: %s", error)
            else:
                return
        logger.info("a new engine core is ready after %.2f s", time.monotonic() - began)
        with self._sending:
            if self._num_deaths == num_deaths:  # else it has died already
                self._is_down = False
                self._on_message(Restarted())

    # --- from the frontends ---

    @property
    def client(self) -> CoreClient:
        """The client of the core that runs now, or ran last."""
        return self._client

    def send(self, message: FrontendMessage) -> None:
        with self._sending:
            if not (self._is_down and isinstance(message, AddRequests)):  # its frontend sends them again
                self._send_all(self._suspects.let_through(message))

    def _send_all(self, messages: Iterable[FrontendMessage]) -> None:
        for message in messages:
            self._client.send(message)

    def shutdown(self) -> None:
        self._is_ending = True
        if self.source is not None:
            self.source.close()
        with self._changing:
            self._client.shutdown()


class _Limit:
    """How often something may happen within some seconds."""

    def __init__(self, count: int, within_s: float) -> None:
        self._times: collections.deque[float] = collections.deque(maxlen=count)
        self._count, self._within_s = count, within_s

    def exceeded(self) -> str | None:
        """It happens once more; what to say where that is once too often."""
        now = time.monotonic()
        if len(self._times) == self._count and now - self._times[0] < self._within_s:
            return f"it was started again {self._count} times within {self._within_s:.0f} s"
        self._times.append(now)
        return None
