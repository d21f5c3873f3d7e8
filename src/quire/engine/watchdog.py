"""Notices a core that makes no progress, from outside: a core that is stopped cannot watch itself.

A thread of the core's client looks at the core's heartbeat while the core has something to do; as long as it has nothing, the
thread waits and uses no CPU.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable

from quire.engine.heartbeat import Activity, Pulse, step_timeout_s
from quire.logger import init_logger
from quire.processes import STACKS_SIGNAL, family

logger = init_logger(__name__)


LOOK_EVERY_S = 1.0
"""Seconds between two looks at a core that works; a tenth of the timeout, if that is less."""

_WRITING_S = 0.1
"""How long a process may write its stacks before the next one is asked, so that they do not mix."""

_WORDS_FOR = {
    Activity.PREPARATION: "while it prepares kernels",
    Activity.REST: "with a message that it does not take in",
    Activity.MESSAGES: "while it takes in requests",
    Activity.STEP: "in a step",
    Activity.GRAMMAR: "while it waits for a grammar to be compiled",
    Activity.CALL: "in a call",
}


def _weak_call(method: Callable[[str], None]) -> Callable[[str], None]:
    """Calls a method as long as its object lives, and does not keep it alive."""
    weak = weakref.WeakMethod(method)

    def call(text: str) -> None:
        alive = weak()
        if alive is not None:
            alive(text)

    return call


class Progress:
    """Judges what was seen of a heartbeat. Time counts as far as this process itself runs: what stops both (Ctrl-Z, a machine
    that sleeps) is no hang.

    Args:
        look_every_s: how far apart two looks are meant to be.
    """

    def __init__(self, look_every_s: float) -> None:
        self._look_every_s = look_every_s
        self._last: Pulse | None = None
        self._still_s = 0.0

    def look(self, pulse: Pulse, elapsed_s: float) -> str:
        """Why the core hangs, or an empty text. `elapsed_s`: since the last look."""
        if self._last is None or pulse.words != self._last.words:
            self._last, self._still_s = pulse, 0.0
            return ""
        self._still_s += min(elapsed_s, 2 * self._look_every_s)
        if self._still_s <= pulse.allowed_s:
            return ""
        setting = (
            "QUIRE_ENGINE_READY_TIMEOUT_S" if pulse.activity is Activity.CALL else "QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS"
        )
        return (
            f"made no progress for {self._still_s:.1f} s {_WORDS_FOR[pulse.activity]} "
            f"({pulse.allowed_s:.1f} s are allowed; {setting})"
        )


class Watchdog:
    """Watches one core.

    Args:
        words: the core's heartbeat.
        on_hang: called in the watching thread with the reason when the core hangs, and with an empty text when it goes on after
            all. A method of the client that owns this watchdog: it does not keep the client alive.
    """

    def __init__(self, words: memoryview, on_hang: Callable[[str], None]) -> None:
        self._words = words
        self._on_hang = _weak_call(on_hang)
        self._num_sent = 0
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._ended = threading.Event()
        self._timeout_s = step_timeout_s()
        self._look_every_s = min(LOOK_EVERY_S, self._timeout_s / 10)

    def begin(self) -> None:
        """The core is ready: watch it from now on. What was sent before does not count."""
        self._num_sent = 0
        self._has_work.set()
        if self._timeout_s:
            threading.Thread(target=self._run, name="engine-core-watchdog", daemon=True).start()

    def sent(self) -> None:
        """A message was sent to the core; from any thread."""
        with self._lock:
            self._num_sent += 1
        if not self._has_work.is_set():
            self._has_work.set()

    def end(self) -> None:
        """Watch no more; from any thread, and more than once."""
        self._ended.set()
        self._has_work.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._has_work.wait()
            self._has_work.clear()  # before the look: what is sent from here on sets it again
            self._watch()

    def _watch(self) -> None:
        """Look at the core until it rests."""
        progress, is_hanging = Progress(self._look_every_s), False
        before = time.monotonic()
        while not (pulse := Pulse(self._words)).is_at_rest(self._num_sent) and not self._ended.is_set():
            now = time.monotonic()
            reason = progress.look(pulse, now - before)
            before = now
            if bool(reason) is not is_hanging:
                is_hanging = not is_hanging
                self._on_hang(reason)
            self._ended.wait(self._look_every_s)
        if is_hanging and not self._ended.is_set():
            self._on_hang("")


def show_stacks(pid: int) -> None:
    """Have a core process and its ranks write their stacks to the log; of those that cannot, what the system knows."""
    for process in family(pid):
        if not process.can_show_stacks:
            logger.error("%s, so it cannot show its stacks", process)
            continue
        logger.error("stacks of %s:", process)
        with contextlib.suppress(OSError):
            os.kill(process.pid, STACKS_SIGNAL)
            time.sleep(_WRITING_S)
