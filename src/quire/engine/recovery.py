"""An engine core in a process of its own that is started again when it dies, so that its requests go on.

The client watches the core. The frontend has the journal: each request's prompt, parameters, seed and tokens so far
(`RequestRecord`). `Replay` says what a new core gets of it, and finds the request that makes cores die.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.messages import CoreMessage, Dead, FrontendMessage, Restarted, Restarting
from quire.engine.request_record import RequestRecord
from quire.errors import QuireError
from quire.logger import init_logger

logger = init_logger(__name__)

MAX_RESTARTS = 10
WINDOW_S = 60.0
"""A core that dies so often within so many seconds stays dead: what kills it will not go away."""

MAX_FRUITLESS = 2
"""Cores that may die under a request without giving it a token, before it goes on alone."""


class RecoveringClient(CoreClient):
    """A core that is started again when it has ended by itself.

    Args:
        start: starts a core that calls what it is given with its messages; told whether it takes the place of a dead one.
        on_message: gets the messages of all cores, `Restarting` between two of them and then `Restarted`; `Dead` is the end.

    Raises:
        ConfigError, EngineDeadError: the first core does not start.
    """

    shares_memory = False

    def __init__(self, start: Callable[[OnMessage, bool], CoreClient], on_message: OnMessage) -> None:
        self._start = start
        self._on_message = on_message
        self._deaths: collections.deque[float] = collections.deque(maxlen=MAX_RESTARTS)
        self._is_ending = False
        self._changing = threading.Lock()  # held while a core is started in another's place
        self._client = start(self._heard, False)
        self.ready = self._client.ready

    def _heard(self, message: CoreMessage) -> None:
        """In the thread that listens to the core."""
        if not isinstance(message, Dead) or self._is_ending:
            self._on_message(message)
            return
        now = time.monotonic()
        if len(self._deaths) == MAX_RESTARTS and now - self._deaths[0] < WINDOW_S:
            text = f"{message.message}; it was started again {MAX_RESTARTS} times within {WINDOW_S:.0f} s"
            self._on_message(Dead(text))
            return
        self._deaths.append(now)
        logger.error("the engine core died and is started again; its requests go on: %s", message.message)
        self._on_message(Restarting(message.message))
        threading.Thread(target=self._restart, name="engine-core-restart", daemon=True).start()

    def _restart(self) -> None:
        began = time.monotonic()
        with self._changing:
            self._client.shutdown()
            if self._is_ending:
                return
            try:
                self._client = self._start(self._heard, True)
            except QuireError as error:
                self._on_message(Dead(f"the engine core could not be started again: {error}"))
                return
        logger.info("a new engine core is ready after %.2f s", time.monotonic() - began)
        self._on_message(Restarted())

    @property
    def client(self) -> CoreClient:
        """The client of the core that runs now, or ran last."""
        return self._client

    def send(self, message: FrontendMessage) -> None:
        self._client.send(message)

    def shutdown(self) -> None:
        self._is_ending = True
        with self._changing:
            self._client.shutdown()


@dataclasses.dataclass
class _Trial:
    """What a request has got from the cores that were given it."""

    num_tokens: int = 0
    num_fruitless: int = 0


class Replay:
    """Which requests a new core gets, and when.

    A core that dies may have been killed from outside, or by one of its requests, and then by the same one again. So a request
    under which `MAX_FRUITLESS` cores in a row died without giving it a token is a suspect: suspects go on one at a time, alone,
    until they get a token, and others wait meanwhile. A request under which a core dies while it is alone has failed.
    """

    def __init__(self) -> None:
        self._trials: dict[str, _Trial] = {}
        self._pending: list[RequestRecord] = []
        self._alone: RequestRecord | None = None

    @property
    def holds_others(self) -> bool:
        """Whether a suspect runs alone, so that no other request may be sent."""
        return self._alone is not None

    def core_died(self, records: Sequence[RequestRecord]) -> RequestRecord | None:
        """A core has died; these requests are unfinished. Returns the one that is at fault, if that is certain."""
        alone, self._alone = self._alone, None
        culprit = None if alone is None or self._is_cleared(alone) else alone
        trials: dict[str, _Trial] = {}
        for record in records:
            before = self._trials.get(record.request_id, _Trial())
            was_held = alone is not None and record is not alone
            fruitless = before.num_fruitless + (not was_held)
            trials[record.request_id] = _Trial(_num_tokens(record), 0 if self._has_progressed(record) else fruitless)
        self._trials = trials
        self._pending = [record for record in records if record is not culprit]
        return culprit

    def next_records(self) -> list[RequestRecord]:
        """What to send to the new core now: a suspect, or all that is left. Nothing while a suspect has not got a token."""
        if self._alone is not None and not self._is_cleared(self._alone):
            return []
        if self._alone is not None:
            self._trials.pop(self._alone.request_id, None)
        pending = [record for record in self._pending if not record.is_finished]
        suspects = (one for one in pending if self._trials[one.request_id].num_fruitless >= MAX_FRUITLESS)
        self._alone = next(suspects, None)
        given = pending if self._alone is None else [self._alone]
        self._pending = [record for record in pending if record not in given]
        return given

    def _is_cleared(self, record: RequestRecord) -> bool:
        return record.is_finished or self._has_progressed(record)

    def _has_progressed(self, record: RequestRecord) -> bool:
        trial = self._trials.get(record.request_id)
        return _num_tokens(record) > (0 if trial is None else trial.num_tokens)


def _num_tokens(record: RequestRecord) -> int:
    return sum(len(sequence.token_ids) for sequence in record.sequences)
