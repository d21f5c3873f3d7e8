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
from quire.platforms.interface import DeviceRuntime, RecordedStep
from quire.sample.sampler import Sampler
from quire.sample.sampling_rows import FILTER
from quire.spec_decode.verification import Verified
from quire.worker.batch_state import BatchState
from quire.worker.device_inputs import DeviceInputs
from quire.worker.draft_batch import BEFORE, CAPACITY, LAST, LENGTH
from quire.worker.drafter import Drafter
from quire.worker.input_prep import PreparedBatch
from quire.worker.step_graphs import StepGraphs, StepShape

FIRST, DRAWS = 4, 5
"""Fields of a row behind those of `DraftBatch`: its first draw in the step, and how many it has."""


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


class DeviceDrafting:
    """Submits a drafter's passes.

    Args:
        graphs: rounds numbers of rows.
        out_S: where a step's draws are.
        is_captured: whether passes are captured as graphs.
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
        self._sampler, self._round, self._out_S, self._is_captured = sampler, graphs.num_logits, out_S, is_captured
        buffers = inputs.buffers
        drafter.make_batch(list(buffers.tables_GRP), buffers.slots_GT.dtype)
        self._fields_FN = torch.zeros(6, state.max_rows, dtype=torch.int32, device=runtime.device())
        self._graphs: dict[Hashable, RecordedStep] = {}
        self._ready: set[Hashable] = set()

    def forget_recorded(self) -> None:
        """Weights or pages are going to be others."""
        self._graphs.clear()
        self._ready.clear()

    def begin(self, plan: SchedulerOutput, read: Callable[[SchedulerOutput], None]) -> npt.NDArray[np.bool_] | None:
        """Before a step is prepared: catch up with its rows; None where it is to have no guesses.

        Args:
            read: has the drafter read the tokens of a step, which is to be prepared for it.
        """
        rows = self._drafter.rows
        if plan.num_drafts <= 0:
            return None
        behind = rows.behind(plan, len(self._inputs.arrays.input_ids_T))
        if behind is not None:
            computed = self._state.num_computed_R[behind.rows]
            self._state.num_computed_R[behind.rows] = rows.followed_R[behind.rows]
            read(behind)
            self._state.num_computed_R[behind.rows] = computed
            rows.caught_up(behind)
        return rows.ready(plan)

    def read(self, step: StepInputs) -> None:
        """Have the drafter read a step whose inputs are on the device."""
        self._drafter.read(dataclasses.replace(step, num_logits=0))

    def submit(self, drafted: DraftedStep, step: StepInputs, verified: Verified | None) -> None:
        """Have guesses made behind a step whose draws are submitted, or are on the host already, and then in `verified`."""
        plan, drafter = drafted.plan, self._drafter
        reads_all = plan.total_num_tokens > len(plan.rows) + sum(map(len, plan.drafts.values()))
        if reads_all:
            self.read(step)
        drafter.rows.follow(plan, drafted.is_ready, has_read_all=reads_all)
        rows = plan.rows[plan.needs_sample]
        if not len(rows):
            return
        self._upload(plan, drafted.batch, rows, verified)
        count, is_filtered = self._round(len(rows)), bool(self._sampler.wanted(rows) & FILTER)
        width = 0 if verified is not None else 1 + drafter.most if plan.drafts else 1
        key = (count, plan.num_drafts, is_filtered, width)
        self._run(key, lambda: self._guess(*key))
        drafts_KN = drafter.batch.drafts_KN[: plan.num_drafts]
        drafted.host_KN = self._runtime.host_empty(drafts_KN.shape, torch.int32)
        drafted.host_KN.copy_(drafts_KN, non_blocking=True)

    def _upload(self, plan: SchedulerOutput, batch: PreparedBatch, rows: IntArray, verified: Verified | None) -> None:
        """The host's words on the rows that draw."""
        count, room = len(rows), self._fields_FN.shape[1]
        words = np.zeros(6 * room + 1, dtype=np.int32)
        fields, words[-1] = words[:-1].reshape(6, room), count
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
        uploaded = self._runtime.upload(words)
        self._fields_FN.copy_(uploaded[:-1].view(6, room))
        self._drafter.batch.live.copy_(uploaded[-1:])

    def _guess(self, count: int, num_drafts: int, is_filtered: bool, width: int) -> None:
        """All passes for so many rows, which have up to `width` draws each; 0: the host has said what came of them."""
        batch, fields = self._drafter.batch, self._fields_FN
        batch.fields_FN[:, :count] = fields[:4, :count]
        first_N = fields[FIRST, :count].long()
        theirs, ours = self._inputs.buffers.columns, batch.columns
        for name in ("rows_S", "inverse_temperature_S", "seed_S", "top_k_S", "top_p_S", "min_p_S"):
            getattr(ours, name)[:count] = getattr(theirs, name)[first_N]
        if width:
            self._accept(count, width, first_N)
        self._drafter.guess(count, num_drafts, self._drafter.compute, is_filtered=is_filtered)

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

    def _run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Replay what was captured, or capture what runs for the second time."""
        graph = self._graphs.get(key)
        if graph is None and self._is_captured and key in self._ready:
            graph = self._runtime.capture(function)
            if graph is None:
                self._is_captured = False
            else:
                self._graphs[key] = graph
        if graph is not None:
            graph.replay(0, 0)
            return
        function()
        self._ready.add(key)

    def take(self, drafted: DraftedStep, output: ModelRunnerOutput) -> None:
        """The guesses have arrived, and the step's tokens are with their rows."""
        if drafted.host_KN is not None:
            output.proposals = self._drafter.proposals(drafted.plan, drafted.is_ready, drafted.host_KN.numpy())

    def rehearse(self, sizes: list[int]) -> None:
        """Every kernel that draftings of these sizes need."""
        for count in sizes:
            for is_filtered in (False, True):
                self._guess(count, min(2, self._drafter.most), is_filtered, 1 + self._drafter.most)
