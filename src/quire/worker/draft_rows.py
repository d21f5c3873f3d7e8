"""What a drafter knows of each row: up to where it has followed the row's tokens, and which pages hold what it keeps of them.

A drafter's layers have pages in the tables of the model's rows. It need not have followed a row everywhere: it rests while its
guesses do not pay, and a prefix that is found in the cache may have been computed meanwhile. So every page is marked once the
drafter has filled it, and a row that takes over pages begins behind the marked ones. Knows rows and pages; knows no tensors.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.core.output import IntArray, SchedulerOutput
from quire.worker.batch_state import BatchState


@dataclasses.dataclass
class _Followed:
    """Rows that the drafter has followed in a step, and those among them that drew a token."""

    rows: IntArray
    drew: npt.NDArray[np.int32]


class DraftRows:
    """A drafter's rows.

    Args:
        group: of the page tables, the one that its layers use.
        reads_drawn: the drafter has read the newest token itself; otherwise it is one token behind, and reads it beside what the
            model computes for the token before.

    Attributes:
        followed_R: leading tokens of each row that it has read.
    """

    def __init__(self, state: BatchState, group: int, num_pages: int, block_size: int, *, reads_drawn: bool) -> None:
        self._state, self._group, self._block_size, self._reads_drawn = state, group, block_size, reads_drawn
        self.followed_R: IntArray = np.zeros(state.max_rows, dtype=np.int32)
        self._filled_P = np.zeros(num_pages, dtype=np.bool_)
        self._filled_P[0] = True  # the null page stands for what no layer sees any more
        self._open: list[_Followed] = []

    def settle(self) -> None:
        """The tokens of earlier steps are known: the rows have got there. To be called before rows change."""
        for done in self._open:
            ends = self._state.num_computed_R[done.rows] + (done.drew if self._reads_drawn else 0)
            self._advance(done.rows, ends)
        self._open.clear()

    def _advance(self, rows: IntArray, ends: IntArray) -> None:
        first, last = self.followed_R[rows] // self._block_size, ends // self._block_size
        for index in (last > first).nonzero()[0].tolist():
            table = self._state.tables_GRP[self._group, rows[index]]
            self._filled_P[table[first[index] : last[index]]] = True
        self.followed_R[rows] = ends

    def apply_diff(self, plan: SchedulerOutput) -> None:
        """Rows and pages have changed as a step says."""
        for _, group, pages in plan.new_blocks:
            if group == self._group:
                self._filled_P[pages] = False
        if plan.swap_ins:
            self._filled_P[[page for _, page in plan.swap_ins]] = False
        for request in plan.new_requests:
            pages, computed = np.array(request.block_ids[self._group], dtype=np.int32), request.num_computed_tokens
            kept = computed // self._block_size
            self._filled_P[pages[kept:]] = False
            missing = (~self._filled_P[pages[:kept]]).nonzero()[0]
            self.followed_R[request.row] = self._block_size * (missing[0] if len(missing) else kept)

    def ready(self, plan: SchedulerOutput) -> npt.NDArray[np.bool_]:
        """Which of a step's rows it has followed up to the tokens that the step computes; to be asked before it is prepared."""
        return self.followed_R[plan.rows] >= self._state.num_computed_R[plan.rows]

    def behind(self, plan: SchedulerOutput, budget: int) -> SchedulerOutput | None:
        """A step over tokens that the drafter has passed over, of the rows of a step; at most so many."""
        lags = self._state.num_computed_R[plan.rows] - self.followed_R[plan.rows]
        counts = np.diff(np.minimum(np.cumsum(np.maximum(lags, 0)), budget), prepend=0).astype(np.int32)
        members = counts.nonzero()[0]
        if not len(members):
            return None
        rows, counts = plan.rows[members], counts[members]
        return SchedulerOutput(-1, rows, counts, np.zeros(len(rows), dtype=np.bool_), int(counts.sum()))

    def catch_up(self, plan: SchedulerOutput, budget: int, read: Callable[[SchedulerOutput], None]) -> None:
        """Have the drafter read what it has passed over of a step's rows: `read` gets a step over at most so many tokens."""
        behind = self.behind(plan, budget)
        if behind is None:
            return
        computed = self._state.num_computed_R[behind.rows]
        self._state.num_computed_R[behind.rows] = self.followed_R[behind.rows]
        read(behind)
        self._state.num_computed_R[behind.rows] = computed
        self._advance(behind.rows, self.followed_R[behind.rows] + behind.num_scheduled_tokens)

    def follow(self, plan: SchedulerOutput, is_ready: npt.NDArray[np.bool_], *, has_read_all: bool) -> None:
        """The drafter goes with a step of the model; `has_read_all`: also with rows that drew nothing."""
        members = is_ready & (plan.needs_sample | has_read_all)
        self._open.append(_Followed(plan.rows[members], plan.needs_sample[members].astype(np.int32)))

    def capacity(self, rows: IntArray) -> IntArray:
        """Tokens that fit into the pages of rows."""
        return self._state.num_pages(self._group, rows) * self._block_size
