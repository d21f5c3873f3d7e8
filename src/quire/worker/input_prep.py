"""Input preparation: from a step's rows and counts to the tensors that the model reads.

Works over persistent numpy buffers that the tensors share, so that a recorded step finds its inputs where they were.
Knows nothing of models or of sampling.

Legend: T tokens of the step, B requests of the step, S tokens that need logits, R rows, L tokens and P pages a row may have.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionMetadata
from quire.core.output import IntArray, SchedulerOutput
from quire.layers.interface import StepInputs
from quire.worker.axis_positions import AxisPositions
from quire.worker.batch_state import BatchState
from quire.worker.cross_steps import CrossBatch, CrossSteps


@dataclasses.dataclass(slots=True)
class PreparedBatch:
    """What the sampler needs to know of a step.

    Attributes:
        rows_S: rows that sample, in batch order.
        positions_S: where each of their new tokens will stand.
        is_decode: every request computes one token.
        first_B: where each row's draws begin in these, if some row draws several times, behind drafts; else None.
    """

    rows_S: IntArray
    positions_S: IntArray
    is_decode: bool = False
    first_B: IntArray | None = None


class InputPreparation:
    """Fills one `StepInputs` in place for each step.

    Args:
        state: the rows.
        max_tokens: tokens a step may have.
        block_size: tokens a page.
        slot_dtype: of slots: int64, or int32 for devices whose kernels read that (`Capabilities.slot_dtype`).
        max_logits: tokens of a step that need logits; as many as there are rows, if nobody says.

    Attributes:
        state: the rows.
        step: what a model reads. The arrays are the buffers behind it, under the names of `StepInputs` and `AttentionMetadata`.
        axes: positions on several axes, for models that have them: a token's plain position then is its place in the step.
    """

    axes: AxisPositions | None = None
    _cross: tuple[CrossBatch, CrossBatch] | None = None

    def __init__(
        self, state: BatchState, max_tokens: int, block_size: int, slot_dtype: Any = np.int64, max_logits: int = 0
    ) -> None:
        self.state = state
        self._block_size = block_size
        max_requests = state.max_rows
        max_logits = max(max_logits, max_requests)
        self.input_ids_T = np.zeros(max_tokens, dtype=np.int32)
        self.positions_T = np.zeros(max_tokens, dtype=np.int32)
        self.logits_index_S = np.zeros(max_logits, dtype=np.int32)
        self.query_start_B = np.zeros(max_requests + 1, dtype=np.int32)
        self.seq_lens_B = np.zeros(max_requests, dtype=np.int32)
        self.rows_B = np.zeros(max_requests, dtype=np.int32)
        self.shape = np.zeros(4, dtype=np.int64)
        self.slots_GT = [np.zeros(max_tokens, dtype=slot_dtype) for _ in state.tables_RP]
        self._token_ids = state.token_ids_RL.reshape(-1)
        self._tables = [table.reshape(-1) for table in state.tables_RP]
        # What does not depend on the step; int64, so that row * row_length cannot overflow.
        self._count_up = np.arange(max(max_tokens, max_requests) + 1, dtype=np.int32)
        self._first_token_R = np.arange(state.max_rows, dtype=np.int64) * state.row_length
        self._first_page_R = np.arange(state.max_rows, dtype=np.int64) * state.row_pages
        # The tokens that need logits, each as a request of one.
        self._sample_start_S = np.arange(max_logits + 1, dtype=np.int32)
        self._sample_lens_S = np.zeros(max_logits, dtype=np.int32)
        self._sample_rows_S = np.zeros(max_logits, dtype=np.int32)
        self._sample_shape = np.zeros(4, dtype=np.int64)
        # How many leading entries of query_start and logits_index count up by one, as decode-only steps want them.
        self._counts_up = 0
        self.step = self._build_step()

    def _build_step(self) -> StepInputs:
        requests = (self.query_start_B, self.seq_lens_B, self.rows_B, self.shape)
        samples = (self._sample_start_S, self._sample_lens_S, self._sample_rows_S, self._sample_shape)
        step, step.sampled = self._build_inputs(*requests), self._build_inputs(*samples)
        return step

    def _build_inputs(self, *arrays: npt.NDArray[Any]) -> StepInputs:
        positions = torch.from_numpy(self.positions_T)
        query_start, seq_lens, rows, shape = (torch.from_numpy(array) for array in arrays)
        attention = [
            AttentionMetadata(
                block_size=self._block_size,
                query_start=query_start,
                seq_lens=seq_lens,
                rows=rows,
                block_table=table,
                slot_mapping=torch.from_numpy(slots),
                positions=positions,
                shape=shape,
            )
            for table, slots in zip(self.state.block_tables, self.slots_GT, strict=True)
        ]
        return StepInputs(
            input_ids=torch.from_numpy(self.input_ids_T),
            positions=positions,
            logits_index=torch.from_numpy(self.logits_index_S),
            attention=attention,
        )

    def see_beside(self, cross: CrossSteps | None) -> None:
        """Describe cross attention, too, behind the groups of the requests' own pages, of a model that has any."""
        if cross is None:
            return
        assert self.step.sampled is not None
        steps = (self.step, self.step.sampled)
        own, sampled = (CrossBatch(cross, step.attention[0]) for step in steps)
        self._cross = (own, sampled)
        for step, batch in zip(steps, self._cross, strict=True):
            step.attention.append(batch.metadata)

    def prepare(self, plan: SchedulerOutput) -> PreparedBatch:
        """Expand a step into `self.step` and count its tokens as computed."""
        requests = len(plan.rows)
        for row, drafts in plan.drafts.items():
            self.state.put_drafts(row, drafts)
        if plan.total_num_tokens == requests:
            batch = self._prepare_decode(plan, requests)
            batch.is_decode = True
            max_query_len = 1
        else:
            batch = self._prepare_mixed(plan, requests)
            max_query_len = int(plan.num_scheduled_tokens.max())
        if self.axes is not None:
            positions_T = self.positions_T[: plan.total_num_tokens]
            self.axes.fill(plan, positions_T)
            positions_T[:] = self._count_up[: len(positions_T)]
        seq_lens_B = self.seq_lens_B[:requests]
        self.rows_B[:requests] = plan.rows
        self.state.num_computed_R[plan.rows] = seq_lens_B
        samples = len(batch.rows_S)
        self._sample_lens_S[:samples], self._sample_rows_S[:samples] = batch.positions_S, batch.rows_S
        self._set_counts(plan.total_num_tokens, requests, max_query_len, int(seq_lens_B.max()), samples)
        if self._cross is not None:
            self._cross[0].fill(plan.rows, plan.total_num_tokens, max_query_len)
            self._cross[1].fill(batch.rows_S, samples, 1)
        return batch

    def _prepare_decode(self, plan: SchedulerOutput, requests: int) -> PreparedBatch:
        """Every request computes one token."""
        rows_B = plan.rows
        positions_B = self.positions_T[:requests]
        seq_lens_B = self.seq_lens_B[:requests]
        self.state.num_computed_R.take(rows_B, out=positions_B, mode="clip")
        np.add(positions_B, 1, out=seq_lens_B)
        self._token_ids.take(
            self._first_token_R.take(rows_B) + positions_B, out=self.input_ids_T[:requests], mode="clip"
        )
        pages_B, offsets_B = np.divmod(positions_B, self._block_size)
        pages_B = pages_B + self._first_page_R.take(rows_B)
        for table, slots_T in zip(self._tables, self.slots_GT, strict=True):
            slots_B = slots_T[:requests]
            np.multiply(table.take(pages_B), self._block_size, out=slots_B)
            slots_B += offsets_B
        if self._counts_up < requests:
            self.query_start_B[: requests + 1] = self._count_up[: requests + 1]
            self.logits_index_S[:requests] = self._count_up[:requests]
            self._counts_up = requests
        if plan.needs_sample.all():
            return PreparedBatch(rows_B, seq_lens_B.copy())
        self._counts_up = 0
        return self._select_sampling(plan, requests)

    def _prepare_mixed(self, plan: SchedulerOutput, requests: int) -> PreparedBatch:
        """Some request computes several tokens."""
        tokens, counts_B, rows_B = plan.total_num_tokens, plan.num_scheduled_tokens, plan.rows
        self._counts_up = 0
        starts_B = self.state.num_computed_R[rows_B]
        np.add(starts_B, counts_B, out=self.seq_lens_B[:requests])
        self.query_start_B[0] = 0
        np.cumsum(counts_B, out=self.query_start_B[1 : requests + 1])
        positions_T = self.positions_T[:tokens]
        np.add(self._count_up[:tokens], np.repeat(starts_B - self.query_start_B[:requests], counts_B), out=positions_T)
        rows_T = np.repeat(rows_B, counts_B)
        self._token_ids.take(self._first_token_R.take(rows_T) + positions_T, out=self.input_ids_T[:tokens], mode="clip")
        pages_T, offsets_T = np.divmod(positions_T, self._block_size)
        pages_T = pages_T + self._first_page_R.take(rows_T)
        for table, slots_T in zip(self._tables, self.slots_GT, strict=True):
            np.multiply(table.take(pages_T), self._block_size, out=slots_T[:tokens])
            slots_T[:tokens] += offsets_T
        return self._select_sampling(plan, requests)

    def _select_sampling(self, plan: SchedulerOutput, requests: int) -> PreparedBatch:
        """Logits are wanted at the last token of the rows that sample, and at their drafts."""
        needs_B = plan.needs_sample
        if plan.drafts:
            return self._select_drafts(plan, requests)
        last_S = self.query_start_B[1 : requests + 1][needs_B] - 1
        self.logits_index_S[: len(last_S)] = last_S
        return PreparedBatch(plan.rows[needs_B], self.seq_lens_B[:requests][needs_B])

    def _select_drafts(self, plan: SchedulerOutput, requests: int) -> PreparedBatch:
        """Logits are wanted at the last token that is known, and at each draft behind it."""
        needs_B = plan.needs_sample
        rows_B = plan.rows[needs_B]
        draws_B = plan.num_draws()[needs_B]
        ends_B = np.cumsum(draws_B, dtype=np.int32)
        # The last draw of a row is at its last token, the one before it a token earlier, and so on.
        back_S = np.repeat(ends_B, draws_B) - 1 - self._count_up[: ends_B[-1]]
        self.logits_index_S[: len(back_S)] = (
            np.repeat(self.query_start_B[1 : requests + 1][needs_B] - 1, draws_B) - back_S
        )
        positions_S = np.repeat(self.seq_lens_B[:requests][needs_B], draws_B) - back_S
        return PreparedBatch(np.repeat(rows_B, draws_B), positions_S, first_B=ends_B - draws_B)

    def _set_counts(self, tokens: int, requests: int, max_query_len: int, max_seq_len: int, logits: int) -> None:
        self.shape[:] = (tokens, requests, max_query_len, max_seq_len)
        _set(self.step, tokens, requests, max_query_len, max_seq_len, logits)
        samples, query_len = (logits, 1) if requests else (0, 0)
        self._sample_shape[:] = (samples, samples, query_len, max_seq_len)
        if self.step.sampled is not None:  # a pooling model wants every token of its last layer
            _set(self.step.sampled, logits, samples, query_len, max_seq_len, logits)

    def set_largest(self, max_tokens: int, max_logits: int) -> None:
        """Counts for recording: the largest a step may have. Attention sees no request, so nothing is computed there."""
        self._set_counts(max_tokens, 0, 0, 0, max_logits)

    def forget_counts(self) -> None:
        """Someone else wrote to the index buffers: fill them anew in the next step."""
        self._counts_up = 0


def _set(step: StepInputs, tokens: int, requests: int, max_query_len: int, max_seq_len: int, logits: int) -> None:
    step.num_tokens, step.num_logits = tokens, logits
    for metadata in step.attention:
        metadata.num_tokens, metadata.num_requests = tokens, requests
        metadata.max_query_len, metadata.max_seq_len = max_query_len, max_seq_len
