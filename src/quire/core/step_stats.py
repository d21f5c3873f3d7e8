"""A scheduler's figures: gauges of the moment with counters since its start, or with counters since the step before.

Knows the pages' counters and keeps its own; is told how many requests run and wait.
"""

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


class StepStats:
    """Counts for one scheduler.

    Args:
        num_deferred: tells how many waiting requests could not start even if there were room.

    Attributes:
        num_preemptions, num_jumped_tokens: since the start.
        drafts: what came of drafts since the start.
    """

    def __init__(self, kv: KVCacheManager, num_deferred: Callable[[], int] = int) -> None:
        self._kv, self._num_deferred = kv, num_deferred
        self.num_preemptions = self.num_jumped_tokens = 0
        self.drafts = DraftCounts()
        self._told: tuple[int, ...] = ()

    def count_preemption(self, request: Request) -> None:
        """A running request gave up its pages."""
        self.num_preemptions += 1
        request.num_preemptions += 1

    def tell(self, num_running: int, num_waiting: int, *, since_start: bool) -> SchedulerStats:
        """Gauges of now, with counters since the scheduler was made, or since this told the last ones that are not."""
        pool, drafts = self._kv.pool, self.drafts
        now = (
            *(self.num_preemptions, self._kv.num_queries, self._kv.num_hits, self.num_jumped_tokens),
            *(drafts.num_drafts, drafts.num_draft_tokens, *drafts.accepted_per_position),
        )
        told = () if since_start else self._told
        if not since_start:
            self._told = now
        counts = [count - before for count, before in zip_longest(now, told, fillvalue=0)]
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_total_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_preemptions=counts[0],
            prefix_cache_queries=counts[1],
            prefix_cache_hits=counts[2],
            num_jumped_tokens=counts[3],
            num_deferred=self._num_deferred(),
            num_drafts=counts[4],
            num_draft_tokens=counts[5],
            accepted_per_position=counts[6:],
        )
