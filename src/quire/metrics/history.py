"""The last twenty minutes of an engine in slots of some seconds, for charts (a step makes its slot: idle time has none); and what
some counters have gained within the last hour, from marks that are a minute apart.

Knows figures of steps. Knows nothing of who shows them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

HOUR_S = 3600.0
MARK_EVERY_S = 60.0


class LastHour:
    """Gains of one engine's counters.

    Args:
        read: gives the counters now.
        clock: gives seconds.
    """

    def __init__(self, read: Callable[[], dict[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._marks: deque[tuple[float, dict[str, float]]] = deque()
        self._began = self._noted = clock()

    def note(self) -> None:
        """Something was counted."""
        self._noted = now = self._clock()
        if self._marks and now - self._marks[-1][0] < MARK_EVERY_S:
            return
        self._marks.append((now, self._read()))
        while len(self._marks) > 1 and self._marks[1][0] <= now - HOUR_S:
            self._marks.popleft()

    def gains(self) -> tuple[float, dict[str, float]]:
        """The seconds that are looked back on, to a minute, and what each counter has gained in them."""
        now, counters = self._clock(), self._read()
        seconds = min(HOUR_S, now - self._began)
        before = [counted for at, counted in self._marks if at <= now - HOUR_S]
        if self._noted <= now - HOUR_S:
            before = [counters]
        base = before[-1] if before else {}
        return seconds, {name: value - base.get(name, 0.0) for name, value in counters.items()}


EVERY_S = 5
"""Seconds of a slot."""
MAX_SLOTS = 240


class Slot(NamedTuple):
    """What was in a slot: its begin as Unix time, the most requests that ran and waited, the pages in use at its end as a share
    of all, and the tokens generated."""

    at: int
    running: int
    waiting: int
    kv_usage: float
    tokens: int


class History:
    """Slots of one engine, oldest first; `clock` gives Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._slots: deque[Slot] = deque(maxlen=MAX_SLOTS)
        self._tokens_before = 0

    def note(self, running: int, waiting: int, kv_usage: float, total_tokens: int) -> None:
        """A step has ended; `total_tokens` have been generated since the start."""
        at = int(self._clock() // EVERY_S) * EVERY_S
        last = self._slots[-1] if self._slots else None
        if last is not None and last.at == at:
            self._slots.pop()
            running, waiting = max(running, last.running), max(waiting, last.waiting)
        else:
            self._tokens_before += last.tokens if last is not None else 0
        self._slots.append(Slot(at, running, waiting, round(kv_usage, 4), total_tokens - self._tokens_before))

    def slots(self) -> list[Slot]:
        """Those that are kept."""
        return list(self._slots)


def merge_slots(histories: Iterable[Iterable[Slot]]) -> list[Slot]:
    """Of processes before one core: each sees the core's requests, and the tokens of its own."""
    found: dict[int, Slot] = {}
    for slot in (slot for history in histories for slot in history):
        one = found.get(slot.at)
        if one is not None:
            running, waiting = max(one.running, slot.running), max(one.waiting, slot.waiting)
            slot = Slot(slot.at, running, waiting, max(one.kv_usage, slot.kv_usage), one.tokens + slot.tokens)
        found[slot.at] = slot
    return [found[at] for at in sorted(found)][-MAX_SLOTS:]
