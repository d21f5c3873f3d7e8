"""A clock on which the machine's other programs do not count."""

import time

from quire.simulator.replay import WallClock


class ThreadClock(WallClock):
    """Seconds that this thread computed, and those that it would have waited. Meant for a model that computes in the thread of
    its core, with one thread."""

    def __init__(self) -> None:
        self._began = time.thread_time()
        self._waited = 0.0

    @property
    def now(self) -> float:
        return time.thread_time() - self._began + self._waited

    def wait_until(self, seconds: float) -> None:
        self._waited += max(0.0, seconds - self.now)
