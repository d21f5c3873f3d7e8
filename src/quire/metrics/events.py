"""What happened to an engine besides answers: restarts, refusals, deadlines, hand-overs. Metrics and the console show it."""

import collections
import dataclasses
import enum
import threading
import time

KEPT = 100
"""Events that are remembered."""

MERGED_WITHIN_S = 1.0
"""Events of one kind that follow each other so closely are one entry, with their number."""


class EventKind(enum.StrEnum):
    """What happened."""

    RESTART = "restart"
    """A core ended by itself and another one is started."""
    REPLAY = "replay"
    """A request was sent to a new core."""
    GIVEN_UP = "given_up"
    """A request failed because cores died under it."""
    HANG = "hang"
    """A core made no progress and was ended."""
    REFUSAL = "refusal"
    """The queue was full."""
    DEADLINE = "deadline"
    """A request did not meet its deadline."""
    HANDOVER = "handover"
    """A request was written down for a successor, or taken over from a predecessor."""
    CONTROL = "control"
    """Pause, sleep, wake-up, an update of weights."""
    BATCH = "batch"
    """A batch began or ended."""


@dataclasses.dataclass
class Event:
    """An entry. `at`: seconds since the epoch, of the last of `count` events; `text`: one line, of the first."""

    kind: EventKind
    at: float
    text: str
    count: int = 1


class EventLog:
    """The last `KEPT` events, and how many there were of each kind. May be written from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: collections.deque[Event] = collections.deque(maxlen=KEPT)
        self.totals: collections.Counter[EventKind] = collections.Counter()

    def add(self, kind: EventKind, text: str, count: int = 1) -> None:
        """Note that something happened `count` times."""
        now = time.time()
        with self._lock:
            self.totals[kind] += count
            last = self._events[-1] if self._events else None
            if last is not None and last.kind == kind and now - last.at < MERGED_WITHIN_S:
                last.at, last.count = now, last.count + count
            else:
                self._events.append(Event(kind, now, text, count))

    def latest(self) -> list[Event]:
        """The events that are remembered, oldest first."""
        with self._lock:
            return [dataclasses.replace(event) for event in self._events]
