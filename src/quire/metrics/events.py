"""What happened to an engine besides answers: restarts, refusals, deadlines, hand-overs. Metrics and the console show it."""

import collections
import dataclasses
import enum
import threading
import time
from collections.abc import Iterable, Mapping

KEPT = 100
"""Events that are remembered."""

MERGED_WITHIN_S = 1.0
"""Events of a kind in `BURSTS`, and equal ones, that follow each other so closely are one entry, with their number."""


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


BURSTS = frozenset({EventKind.REPLAY, EventKind.REFUSAL, EventKind.DEADLINE, EventKind.HANDOVER})
"""Kinds that come in numbers, one for each request."""


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
            alike = last is not None and last.kind == kind and (kind in BURSTS or last.text == text)
            if last is not None and alike and now - last.at < MERGED_WITHIN_S:
                last.at, last.count = now, last.count + count
            else:
                self._events.append(Event(kind, now, text, count))

    def latest(self) -> list[Event]:
        """The events that are remembered, oldest first."""
        with self._lock:
            return [dataclasses.replace(event) for event in self._events]


SEEN_BY_ALL = frozenset({EventKind.RESTART, EventKind.HANG})
"""Kinds that are the core's: each of a server's processes notes the same event. The others are noted by one process."""


def merge_events(logs: Iterable[Iterable[Event]]) -> list[Event]:
    """The events of a server's processes as one log: the last `KEPT`, oldest first. What all of them saw is there once."""
    merged: list[Event] = []
    for event in sorted((event for log in logs for event in log), key=lambda event: event.at):
        near = (known for known in reversed(merged) if event.at - known.at < MERGED_WITHIN_S)
        if event.kind in SEEN_BY_ALL and any((known.kind, known.text) == (event.kind, event.text) for known in near):
            continue
        merged.append(event)
    return merged[-KEPT:]


def merge_totals(totals: Iterable[Mapping[EventKind, int]]) -> dict[EventKind, int]:
    """How many events of each kind there were in all processes. One that was started later has seen less of what all see."""
    merged: dict[EventKind, int] = {}
    for each in totals:
        for kind, count in each.items():
            before = merged.get(kind, 0)
            merged[kind] = max(before, count) if kind in SEEN_BY_ALL else before + count
    return merged
