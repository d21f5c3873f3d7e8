"""A scheduler's figures: gauges of the moment with counters since its start, or with counters since the step before.

Knows the pages' counters and keeps its own; is told how many requests run and wait.
"""

import copy
from collections.abc import Callable
from itertools import zip_longest

from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request_state import Request
from quire.request import SchedulerStats


class DraftCounts:
    """What came of drafts since the start.

    Attributes:
        num_drafts: rows that verified drafts, once for each step.
        num_draft_tokens: their drafts. accepted_per_position: those that were right, by place.
    """

    def __init__(self) -> None:
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_per_position: list[int] = []

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(self.accepted_per_position)

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """A row verified so many."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.accepted_per_position += [0] * (num_draft_tokens - len(self.accepted_per_position))
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def tell(self, stats: SchedulerStats, before: "DraftCounts") -> None:
        """Write down what has come since `before`."""
        stats.num_drafts = self.num_drafts - before.num_drafts
        stats.num_draft_tokens = self.num_draft_tokens - before.num_draft_tokens
        pairs = zip_longest(self.accepted_per_position, before.accepted_per_position, fillvalue=0)
        stats.accepted_per_position = [count - earlier for count, earlier in pairs]


class StepStats:
    """Counts for one scheduler.

    Args:
        num_deferred: tells how many waiting requests could not start even if there were room.

    Attributes:
        num_preemptions, num_jumped_tokens: since the start.
        drafts: what came of drafts since the start.
    """

    def __init__(self, kv: KVCacheManager, num_deferred: Callable[[], int] = int) -> None:
        self._kv = kv
        self._num_deferred = num_deferred
        self.num_preemptions = self.num_jumped_tokens = 0
        self.drafts, self._told_drafts = DraftCounts(), DraftCounts()
        self._reported = (0, 0, 0, 0)

    def count_preemption(self, request: Request) -> None:
        """A running request gave up its pages."""
        self.num_preemptions += 1
        request.num_preemptions += 1

    def since_start(self, num_running: int, num_waiting: int) -> SchedulerStats:
        """Counters since the scheduler was made."""
        stats = self._build(num_running, num_waiting, (0, 0, 0, 0))
        self.drafts.tell(stats, DraftCounts())
        return stats

    def of_step(self, num_running: int, num_waiting: int, num_batched_tokens: int, step_ms: float) -> SchedulerStats:
        """Counters since the last step's."""
        stats = self._build(num_running, num_waiting, self._reported)
        self._reported = (self.num_preemptions, self._kv.num_queries, self._kv.num_hits, self.num_jumped_tokens)
        stats.num_batched_tokens = num_batched_tokens
        stats.step_ms = step_ms
        if self.drafts.num_drafts != self._told_drafts.num_drafts:
            self.drafts.tell(stats, self._told_drafts)
            self._told_drafts = copy.deepcopy(self.drafts)
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
