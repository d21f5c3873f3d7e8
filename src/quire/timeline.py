"""Where the time of a start goes: phases with a begin and an end, also of things that happen at the same time.

Every part of a start reports into the process's one `STARTUP`: `with STARTUP.phase("weights") as note: …`. The line that it
ends in is in the log, in `quire explain` and in what `quire bench startup` writes. Knows clocks; knows nothing of what is
timed.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

FRESH_PROCESS_S = 30.0
"""An engine that starts in a process younger than this counts from the process's start, a later one from its own."""


BEFORE = "python"
"""What there was before the first phase: the interpreter, and the modules that know of phases."""


@dataclasses.dataclass
class Phase:
    """A stretch of the start. Times are seconds since the origin; `end` is None while it lasts.

    Attributes:
        is_beside: it happens beside others, in a thread or process of its own.
    """

    name: str
    begin: float
    end: float | None = None
    note: str = ""
    is_beside: bool = False

    @property
    def seconds(self) -> float:
        """How long it took; 0 while it lasts."""
        return 0.0 if self.end is None else self.end - self.begin


def process_age() -> float | None:
    """Seconds since this process was started, to a hundredth; None where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class Timeline:
    """The phases of one start.

    Args:
        clock: seconds, never going back.
        age: how old the process is at this moment; None where that is not known.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, age: float | None = None) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._imported = clock()
        self._origin = self._imported - (age or 0.0)
        self._phases: list[Phase] = []
        self._ready: float | None = None
        self._is_process = True
        if age is not None:
            self._phases.append(Phase(BEFORE, 0.0, age))

    def begin_engine(self) -> None:
        """An engine starts. In a process that is older than a start takes, what came before is not part of it."""
        now = self._clock()
        with self._lock:
            if self._ready is None and now - self._origin < FRESH_PROCESS_S:
                return
            self._origin, self._phases, self._ready, self._is_process = now, [], None, False

    @contextlib.contextmanager
    def phase(self, name: str, *, is_beside: bool = False) -> Generator[Phase]:
        """Time what happens within; phases of one name add up. `note` of what it gives is shown beside the seconds. What begins
        when the engine is ready (weights that come back after a sleep) is no part of its start."""
        entry = Phase(name, self._clock() - self._origin, is_beside=is_beside)
        with self._lock:
            if self._ready is None:
                if [phase.name for phase in self._phases] == [BEFORE]:
                    self._phases[0].end = entry.begin
                self._phases.append(entry)
        try:
            yield entry
        finally:
            entry.end = self._clock() - self._origin

    def ready(self) -> float:
        """The engine can take requests: seconds since the origin."""
        self._ready = self._clock() - self._origin
        return self._ready

    def phases(self) -> list[Phase]:
        """Every phase that has begun, in order of their begins."""
        with self._lock:
            return sorted(self._phases, key=lambda phase: phase.begin)

    def line(self) -> str:
        """All of it for a reader: `imports 1.9 s | weights 0.6 (12 GB/s) | … | ready 3.6 s`. Phases in brackets ran
        beside the others; `…` marks one that lasts."""
        totals: dict[str, Phase] = {}
        for phase in self.phases():
            total = totals.setdefault(phase.name, Phase(phase.name, 0.0, 0.0, is_beside=phase.is_beside))
            lasts = phase.end is None or total.end is None
            total.end = None if lasts else (total.end or 0.0) + phase.seconds
            total.note = phase.note or total.note
        parts: list[str] = []
        for total in totals.values():
            if total.end is None:
                text = f"{total.name} …" + (f" ({total.note})" if total.note else "")
            else:
                text = f"{total.name} {total.seconds:.1f} " + (f"({total.note})" if total.note else "s")
            parts.append(f"[{text}]" if total.is_beside else text)
        if self._ready is not None:
            parts.append(f"ready {self._ready:.1f} s" + (" after the process's start" if self._is_process else ""))
        return " | ".join(parts)

    def report(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "line": self.line(),
            "ready_s": self._ready,
            "since_process_start": self._is_process,
            "phases": [
                {
                    "name": phase.name,
                    "begin_s": round(phase.begin, 4),
                    "end_s": None if phase.end is None else round(phase.end, 4),
                    **({"note": phase.note} if phase.note else {}),
                    **({"beside": True} if phase.is_beside else {}),
                }
                for phase in self.phases()
            ],
        }


STARTUP = Timeline(age=process_age())
"""The start of this process's engine."""
