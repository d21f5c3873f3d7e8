"""A drafter's work where steps are computed when they are executed: passes are recorded once, and replayed.

Legend: N rows, T tokens, V vocabulary.
"""

import time

import numpy as np
import numpy.typing as npt
import torch

from quire.core.output import IntArray, ModelRunnerOutput, SchedulerOutput
from quire.layers.interface import StepInputs
from quire.platforms.interface import DeviceRuntime, RecordedStep
from quire.sample.sampler import Sampler
from quire.sample.sampling_rows import FILTER
from quire.worker.batch_state import BatchState
from quire.worker.draft_batch import BEFORE, CAPACITY, LAST, LENGTH
from quire.worker.drafter import Drafter, HeadDrafter
from quire.worker.input_prep import InputPreparation


class _Pass:
    """A pass of the drafter: recorded, or computed."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._step: RecordedStep | None = None
        self._out = torch.empty(0)

    def record(self, runtime: DeviceRuntime, step: StepInputs, num_tokens: int, num_logits: int) -> None:
        """Record the pass over a step at its largest size."""

        def run() -> None:
            self._out = self._drafter.compute(step)

        self._step = runtime.record(run, num_tokens, num_logits)

    def run(self, step: StepInputs) -> torch.Tensor:
        """Its logits [N, V] for a step; the inputs are where they were when it was recorded."""
        if self._step is None:
            return self._drafter.compute(step)
        self._step.replay(step.num_tokens, step.num_logits)
        return self._out[: step.num_logits]


class HostDrafting:
    """Runs a drafter's passes.

    Args:
        max_tokens, max_draws: the largest step of the model.

    Attributes:
        begin_ms: how long it took to catch up with the rows of a step, before that was prepared.
    """

    begin_ms = 0.0

    def __init__(
        self,
        drafter: Drafter,
        inputs: InputPreparation,
        state: BatchState,
        sampler: Sampler,
        max_tokens: int,
        max_draws: int,
    ) -> None:
        self._drafter, self._inputs, self._state, self._sampler = drafter, inputs, state, sampler
        self._sizes = (max_tokens, max_draws)
        drafter.make_batch(state.block_tables, inputs.step.attention[0].slot_mapping.dtype)
        self.forget_recorded()

    def forget_recorded(self) -> None:
        """Weights or pages are going to be others."""
        self._over_step, self._over_rows = _Pass(self._drafter), _Pass(self._drafter)

    def record(self, runtime: DeviceRuntime) -> None:
        """Record both passes: over a step's tokens, and over a few of each row."""
        drafter, rows = self._drafter, self._drafter.max_rows
        if not drafter.model.can_replay:
            return
        self._inputs.set_largest(*self._sizes)
        is_head = isinstance(drafter, HeadDrafter)
        num_logits = rows if is_head else 0
        over_step = drafter.reading(self._inputs.step, num_logits)
        self._over_step.record(runtime, over_step, self._sizes[0], rows if is_head else self._sizes[1])
        if drafter.is_parallel:  # its tokens and its logits could not be told apart: they are as many
            return
        few = drafter.batch.place(rows, 1 if is_head else 2, 0)
        self._over_rows.record(runtime, few, few.num_tokens, rows + 1 if is_head else rows)

    def begin(self, plan: SchedulerOutput) -> npt.NDArray[np.bool_] | None:
        """Before a step is prepared: catch up with its rows. Returns which of them can have guesses; None where the drafter has
        nothing to do."""
        began = time.perf_counter()
        is_ready = self._drafter.begin(plan, self._sizes[0], self._read)
        self.begin_ms = (time.perf_counter() - began) * 1e3
        return is_ready

    def _read(self, plan: SchedulerOutput) -> None:
        self._inputs.prepare(plan)
        self._over_step.run(self._drafter.reading(self._inputs.step))

    def propose(self, plan: SchedulerOutput, is_ready: npt.NDArray[np.bool_], output: ModelRunnerOutput) -> None:
        """Have the drafter follow a step whose tokens are known, and guess behind it."""
        began = time.perf_counter()
        self._follow(plan, is_ready, output)
        output.draft_ms = self.begin_ms + (time.perf_counter() - began) * 1e3

    def _follow(self, plan: SchedulerOutput, is_ready: npt.NDArray[np.bool_], output: ModelRunnerOutput) -> None:
        drafter = self._drafter
        is_head = isinstance(drafter, HeadDrafter)
        has_prompts = plan.total_num_tokens > len(plan.rows) + sum(map(len, plan.drafts.values()))
        reads_all = is_head or has_prompts or drafter.reads_steps
        rows, count = plan.rows[plan.needs_sample], int(np.count_nonzero(plan.needs_sample))
        if isinstance(drafter, HeadDrafter):
            self._point(drafter, plan)
        elif reads_all:
            self._over_step.run(self._drafter.reading(self._inputs.step))
        drafter.rows.follow(plan, is_ready, has_read_all=reads_all)
        if not count or plan.num_drafts == 0:
            if is_head:
                self._over_step.run(self._drafter.reading(self._inputs.step))
            return
        self._tell(rows)

        def first() -> torch.Tensor:
            if not is_head:
                return drafter.first_pass(count, self._over_rows.run)
            return self._over_step.run(drafter.reading(self._inputs.step, count))

        is_filtered = bool(self._sampler.wanted(rows) & FILTER)
        drafter.guess(count, plan.num_drafts, first, self._over_rows.run, is_filtered=is_filtered)
        output.proposals = drafter.proposals(plan, is_ready, drafter.batch.drafts_KN.numpy())

    def _point(self, drafter: HeadDrafter, plan: SchedulerOutput) -> None:
        """The token behind each token of the step, and each row's last one that the model computed."""
        state, arrays, counts = self._state, self._inputs, plan.num_scheduled_tokens
        rows_T, positions_T = np.repeat(plan.rows, counts), arrays.positions_T[: plan.total_num_tokens]
        drafter.ids_T.numpy()[: len(rows_T)] = state.token_ids_RL[rows_T, positions_T + 1]
        starts_N = arrays.query_start_B[: len(plan.rows)][plan.needs_sample]
        behind_N = state.num_tokens_R[plan.rows[plan.needs_sample]] - 2 - positions_T[starts_N]
        drafter.index_N.numpy()[: len(starts_N)] = starts_N + behind_N

    def _tell(self, rows: IntArray) -> None:
        """What the drafter draws with for these rows, and their last tokens."""
        batch, lengths, ids = self._drafter.batch, self._state.num_tokens_R[rows], self._state.token_ids_RL
        self._sampler.table.pack(rows, lengths, batch.columns)
        fields = batch.fields_FN.numpy()[:, : len(rows)]
        fields[CAPACITY], fields[LENGTH] = self._drafter.rows.capacity(rows), lengths
        fields[LAST], fields[BEFORE] = ids[rows, lengths - 1], ids[rows, lengths - 2]
        batch.live[0] = len(rows)
