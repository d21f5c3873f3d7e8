"""A drafter's work on a device beside the host: submitted behind a step, before the step's tokens are on the host.

Which drafts were right is found on the device; the host only says where each row's draws are and how many pages it has. All
passes of one drafting are one graph for each rounded number of rows. Knows no vendor.

Legend: N rows, S draws of the step, T tokens, W draws of a row, K drafts, F fields.
"""

import dataclasses
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt
import torch

from quire.core.output import IntArray, ModelRunnerOutput, SchedulerOutput
from quire.layers.interface import StepInputs
from quire.platforms.interface import DeviceRuntime
from quire.sample.sampler import Sampler
from quire.sample.sampling_rows import FILTER
from quire.spec_decode.verification import Verified
from quire.worker.batch_state import BatchState
from quire.worker.device_inputs import DeviceInputs
from quire.worker.draft_batch import BEFORE, CAPACITY, LAST, LENGTH
from quire.worker.drafter import Drafter, HeadDrafter
from quire.worker.input_prep import PreparedBatch
from quire.worker.step_graphs import Captures, StepGraphs, StepShape

FIRST, DRAWS, PLACE = 4, 5, 6
"""Fields of a row behind those of `DraftBatch`: its first draw in the step, how many it has, and which of the step's tokens is
the last that the model computed for it."""
NUM_FIELDS = 7


@dataclasses.dataclass
class DraftedStep:
    """A step behind which a drafter guesses.

    Attributes:
        is_ready: of its rows, which the drafter has followed.
        host_KN: where the guesses arrive, once they are submitted.
    """

    plan: SchedulerOutput
    batch: PreparedBatch
    shape: StepShape
    is_ready: npt.NDArray[np.bool_]
    host_KN: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Bounds of a drafting: rows, guesses of each, whether filters are there, and draws of a row in the step; 0: the host has
    said what came of them."""

    count: int
    num_drafts: int
    is_filtered: bool
    width: int


class DeviceDrafting:
    """Submits a drafter's passes.

    Args:
        graphs: rounds numbers of rows.
        out_S: where a step's draws are.
        is_captured: whether passes are captured as graphs, if the drafter's can be.
    """

    def __init__(
        self,
        drafter: Drafter,
        runtime: DeviceRuntime,
        inputs: DeviceInputs,
        state: BatchState,
        sampler: Sampler,
        graphs: StepGraphs,
        out_S: torch.Tensor,
        *,
        is_captured: bool,
    ) -> None:
        self._drafter, self._runtime, self._inputs, self._state = drafter, runtime, inputs, state
        self._sampler, self._round, self._out_S = sampler, graphs.num_logits, out_S
        buffers = inputs.buffers
        drafter.make_batch(list(buffers.tables_GRP), buffers.slots_GT.dtype)
        self._fields_FN = torch.zeros(NUM_FIELDS, state.max_rows, dtype=torch.int32, device=runtime.device())
        self._captures = Captures(runtime, is_enabled=is_captured and drafter.model.can_replay)
        self._later: torch.Tensor | None = None

    def forget_recorded(self) -> None:
        """Weights or pages are going to be others."""
        self._captures.forget()

    def begin(self, plan: SchedulerOutput, read: Callable[[SchedulerOutput], None]) -> npt.NDArray[np.bool_] | None:
        """Before a step is prepared: catch up with its rows. Returns which of them can have guesses; None where the drafter has
        nothing to do.

        Args:
            read: has the drafter read the tokens of a step, which is to be prepared for it.
        """
        return self._drafter.begin(plan, len(self._inputs.host.input_ids_T), read)

    def read(self, step: StepInputs) -> None:
        """Have the drafter read a step whose inputs are on the device."""
        self._drafter.compute(self._drafter.reading(step))

    def submit(self, drafted: DraftedStep, step: StepInputs, verified: Verified | None) -> bool:
        """Have guesses made behind a step whose draws are submitted, or are on the host already, and then in `verified`. Whether
        later draftings of this kind will take as long."""
        plan, drafter, is_usual = drafted.plan, self._drafter, True
        is_head = isinstance(drafter, HeadDrafter)
        follows = is_head or drafter.reads_steps
        has_prompts = plan.total_num_tokens > len(plan.rows) + sum(map(len, plan.drafts.values()))
        if has_prompts and not is_head:
            self.read(step)
        drafter.rows.follow(plan, drafted.is_ready, has_read_all=has_prompts or follows)
        rows = plan.rows[plan.needs_sample]
        if len(rows):
            self._upload(plan, drafted.batch, rows, verified)
        if isinstance(drafter, HeadDrafter):
            self._put_next(drafter, plan, step, has_prompts=has_prompts)
        elif not len(rows):
            return True
        width = 0 if verified is not None else 1 + drafter.most if plan.drafts else 1
        count = self._round(len(rows)) if len(rows) else 0
        shape = _Shape(count, plan.num_drafts, bool(self._sampler.wanted(rows) & FILTER), width)
        if is_head and (has_prompts or not count):
            self._guess(shape, step)
        else:

            def run(_: Hashable) -> None:
                if drafter.reads_steps and not has_prompts:
                    self.read(step)
                self._guess(shape, step)

            is_usual = self._captures.run((shape, drafted.shape if follows else None), run)
        if count and plan.num_drafts:
            drafts_KN = drafter.batch.drafts_KN[: plan.num_drafts]
            drafted.host_KN = self._runtime.host_empty(drafts_KN.shape, torch.int32)
            drafted.host_KN.copy_(drafts_KN, non_blocking=True)
        return is_usual

    def _put_next(self, drafter: HeadDrafter, plan: SchedulerOutput, step: StepInputs, *, has_prompts: bool) -> None:
        """The tokens behind those of prompts whose next part is computed later; the others are found on the device."""
        self._later = None
        if not has_prompts or plan.needs_sample.all():
            return
        rows = plan.rows[~plan.needs_sample]
        ends = self._inputs.host.query_start_B[1 : len(plan.rows) + 1][~plan.needs_sample] - 1
        next_ids = self._state.token_ids_RL[rows, self._state.num_computed_R[rows]]
        self._later = self._runtime.upload(np.stack([ends, next_ids]).astype(np.int32))

    def _upload(self, plan: SchedulerOutput, batch: PreparedBatch, rows: IntArray, verified: Verified | None) -> None:
        """The host's words on the rows that draw."""
        count, room = len(rows), self._fields_FN.shape[1]
        words = np.zeros(NUM_FIELDS * room + 1, dtype=np.int32)
        fields, words[-1] = words[:-1].reshape(NUM_FIELDS, room), count
        fields[CAPACITY, :count] = self._drafter.rows.capacity(rows)
        fields[FIRST, :count] = np.arange(count) if batch.first_B is None else batch.first_B
        fields[DRAWS, :count] = plan.num_draws()[plan.needs_sample]
        if verified is not None:
            for index, (row, position, token) in enumerate(
                zip(rows.tolist(), verified.positions.tolist(), verified.first.token_ids.tolist(), strict=True)
            ):
                known = [int(self._state.token_ids_RL[row, position - 1]), token, *verified.accepted.get(row, ())]
                fields[LENGTH, index] = position + len(known) - 1
                fields[BEFORE, index], fields[LAST, index] = known[-2:]
                first = int(fields[FIRST, index])
                fields[PLACE, index] = self._inputs.host.logits_index_S[first] + len(known) - 2
        uploaded = self._runtime.upload(words)
        self._fields_FN.copy_(uploaded[:-1].view(NUM_FIELDS, room))
        self._drafter.batch.live.copy_(uploaded[-1:])

    def _guess(self, shape: "_Shape", step: StepInputs) -> None:
        """All passes behind a step."""
        drafter, batch, count = self._drafter, self._drafter.batch, shape.count
        if count:
            batch.fields_FN[:, :count] = self._fields_FN[:4, :count]
            first_N = self._fields_FN[FIRST, :count].long()
            theirs, ours = self._inputs.buffers.columns, batch.columns
            for name in ("rows_S", "inverse_temperature_S", "seed_S", "top_k_S", "top_p_S", "min_p_S"):
                getattr(ours, name)[:count] = getattr(theirs, name)[first_N]
            if shape.width:
                self._accept(count, shape.width, first_N)
        if isinstance(drafter, HeadDrafter):
            step = self._over_step(drafter, count, step, shape)
            if not (count and shape.num_drafts):
                drafter.compute(step)
                return

        def first() -> torch.Tensor:
            is_head = isinstance(drafter, HeadDrafter)
            return drafter.compute(step) if is_head else drafter.first_pass(count, drafter.compute)

        drafter.guess(count, shape.num_drafts, first, drafter.compute, is_filtered=shape.is_filtered)

    def _over_step(self, drafter: HeadDrafter, count: int, step: StepInputs, shape: "_Shape") -> StepInputs:
        """The step as a head reads it: at each token the one behind it."""
        tokens, ids_T = step.num_tokens, drafter.ids_T
        ids_T[: tokens - 1] = self._inputs.buffers.input_ids_T[1:tokens]
        if self._later is not None:
            ids_T[self._later[0].long()] = self._later[1]
        if count:
            place_N = self._fields_FN[PLACE, :count]
            ids_T[place_N.long()] = drafter.batch.fields_FN[LAST, :count]
            drafter.index_N[:count] = place_N
        return drafter.reading(step, count if shape.num_drafts else 0)

    def _accept(self, count: int, width: int, first_N: torch.Tensor) -> None:
        """How many drafts of each row were right, and so which tokens are its last."""
        buffers, fields = self._inputs.buffers, self._drafter.batch.fields_FN
        last_index = len(self._out_S) - 1
        if width > 1:
            place_W = torch.arange(width, device=first_N.device)
            at_NW = (first_N[:, None] + place_W).clamp_(max=last_index)
            drawn_NW = self._out_S[at_NW]
            read_NW = buffers.input_ids_T[buffers.logits_index_S[at_NW].long()]
            is_draft = place_W[1:] < self._fields_FN[DRAWS, :count, None]
            is_right = (drawn_NW[:, :-1] == read_NW[:, 1:]) & is_draft
            first_N = first_N + is_right.int().cumprod(1).sum(1)
        fields[LAST, :count] = self._out_S[first_N]
        fields[BEFORE, :count] = buffers.input_ids_T[buffers.logits_index_S[first_N].long()]
        fields[LENGTH, :count] = buffers.columns.positions_S[first_N] + 1
        self._fields_FN[PLACE, :count] = buffers.logits_index_S[first_N]

    def take(self, drafted: DraftedStep, output: ModelRunnerOutput) -> None:
        """The guesses have arrived, and the step's tokens are with their rows."""
        if drafted.host_KN is not None:
            output.proposals = self._drafter.proposals(drafted.plan, drafted.is_ready, drafted.host_KN.numpy())

    def rehearse(self, sizes: list[int], step: Callable[[int], StepInputs]) -> None:
        """Every kernel that draftings of these sizes need; `step` gives a step of so many tokens."""
        for count in sizes:
            for is_filtered in (False, True):
                self._guess(_Shape(count, min(2, self._drafter.most), is_filtered, 1 + self._drafter.most), step(count))
