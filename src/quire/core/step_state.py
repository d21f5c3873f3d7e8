"""The scheduler's notes on steps: what the workers have to be told yet, and what is in flight. Plain records."""

import msgspec
import numpy as np

from quire.core.output import IntArray, NewRequestData, SchedulerOutput

NO_ROWS: IntArray = np.zeros(0, dtype=np.int32)


class PendingDiff(msgspec.Struct):
    """What the workers have to be told with the next step that computes anything."""

    new_requests: list[NewRequestData] = []
    new_blocks: list[tuple[int, int, list[int]]] = []
    finished_rows: list[int] = []
    swap_outs: list[tuple[int, int]] = []
    swap_ins: list[tuple[int, int]] = []
    known_tokens: list[tuple[int, int, list[int]]] = []

    def forget(self, row: int) -> None:
        """The row has no owner any more: what was to be told of it is of no use."""
        self.new_blocks = [entry for entry in self.new_blocks if entry[0] != row]
        self.known_tokens = [entry for entry in self.known_tokens if entry[0] != row]


class StepInFlight(msgspec.Struct):
    """A step that was scheduled and is not collected yet. `num_prompt_tokens`: how many of its tokens are of prompts. `began`:
    when it was planned, in seconds."""

    step: SchedulerOutput
    prefill_rows: list[int]
    num_prompt_tokens: int
    num_samples: int
    attended: float
    began: float


def without_zeros(rows: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Rows that have anything to compute."""
    if np.count_nonzero(counts) == len(counts):
        return rows, counts
    wanted = counts > 0
    return rows[wanted], counts[wanted]
