"""A scheduler's figures: gauges of the moment with counters since its start, or with counters since the step before.

Knows the pages' counters and keeps its own; is told how many requests run and wait.
"""

from collections.abc import Callable

from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request_state import Request
from quire.request import SchedulerStats


class StepStats:
    """Counts for one scheduler.

    Args:
        num_deferred: tells how many waiting requests could not start even if there were room.

    Attributes:
        num_preemptions, num_jumped_tokens: since the start.
    """

    def __init__(self, kv: KVCacheManager, num_deferred: Callable[[], int] = int) -> None:
        self._kv = kv
        self._num_deferred = num_deferred
        self.num_preemptions = self.num_jumped_tokens = 0
        self._reported = (0, 0, 0, 0)

    def count_preemption(self, request: Request) -> None:
        """A running request gave up its pages."""
        self.num_preemptions += 1
        request.num_preemptions += 1

    def since_start(self, num_running: int, num_waiting: int) -> SchedulerStats:
        """Counters since the scheduler was made."""
        return self._build(num_running, num_waiting, (0, 0, 0, 0))

    def of_step(self, num_running: int, num_waiting: int, num_batched_tokens: int, step_ms: float) -> SchedulerStats:
        """Counters since the last step's."""
        stats = self._build(num_running, num_waiting, self._reported)
        self._reported = (self.num_preemptions, self._kv.num_queries, self._kv.num_hits, self.num_jumped_tokens)
        stats.num_batched_tokens = num_batched_tokens
        stats.step_ms = step_ms
        return stats

    def _build(self, num_running: int, num_waiting: int, before: tuple[int, int, int, int]) -> SchedulerStats:
        kv = self._kv
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_total_blocks=kv.pool.num_usable,
            num_free_blocks=kv.pool.num_free,
            num_preemptions=self.num_preemptions - before[0],
            prefix_cache_queries=kv.num_queries - before[1],
            prefix_cache_hits=kv.num_hits - before[2],
            num_jumped_tokens=self.num_jumped_tokens - before[3],
            num_deferred=self._num_deferred(),
        )
