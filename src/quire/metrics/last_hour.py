"""What some counters have gained within the last hour, from marks that are a minute apart.

A step makes a mark; idle time has none. Knows counters by name. Knows nothing of who looks.
"""

import time
from collections import deque
from collections.abc import Callable

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
