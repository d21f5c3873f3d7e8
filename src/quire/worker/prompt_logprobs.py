"""Prompt logprobs: logits at every prompt position that a step computed, a few rows at a time.

Runs after sampling, over the hidden states that the step's forward pass left. Knows rows and logits; nothing of pages.

Legend: B requests of the step, S logits rows that fit at once, N prompt positions.
"""

from collections.abc import Callable

import numpy as np
import torch

from quire.core.output import IntArray, SchedulerOutput, TokenLogprobs
from quire.layers.interface import CausalLM, StepInputs
from quire.sample.sampler import Sampler
from quire.worker.batch_state import BatchState


class PromptLogprobs:
    """Which rows want the logprobs of their prompt, and their computation.

    Args:
        round_up: how many rows of logits are computed where so many are wanted, at most `max_logits`.
        tell: is told the row, and how many of its logits are computed next. `limit`: takes the tokens away that it does not have.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        max_logits: int,
        round_up: Callable[[int], int] = lambda count: count,
        tell: Callable[[int, int], None] = lambda row, count: None,
        limit: Callable[[torch.Tensor], None] = lambda logits_SV: None,
    ) -> None:
        self._model = model
        self._round_up, self._tell, self._limit = round_up, tell, limit
        self._sampler = sampler
        self._max_logits = max_logits
        self._rows: set[int] = set()

    @property
    def is_wanted(self) -> bool:
        """Whether any row wants them."""
        return bool(self._rows)

    def add_row(self, row: int) -> None:
        """The row's request asked for them."""
        self._rows.add(row)

    def remove_row(self, row: int) -> None:
        """The row is free again."""
        self._rows.discard(row)

    def compute(
        self, plan: SchedulerOutput, starts_B: IntArray, query_start_B: IntArray, state: BatchState, step: StepInputs
    ) -> dict[int, TokenLogprobs]:
        """By row, the logprobs of the prompt tokens that this step's positions predict."""
        results: dict[int, TokenLogprobs] = {}
        for index, row in enumerate(plan.rows.tolist()):
            if row not in self._rows:
                continue
            start = int(starts_B[index])
            end = min(start + int(plan.num_scheduled_tokens[index]), int(state.num_prompt_R[row]) - 1)
            if start < end:
                targets_N = state.token_ids_RL[row, start + 1 : end + 1]
                results[row] = self._compute_row(row, int(query_start_B[index]), targets_N, step)
            if end >= int(state.num_prompt_R[row]) - 1:
                self._rows.discard(row)
        return results

    def _compute_row(self, row: int, first_token: int, targets_N: IntArray, step: StepInputs) -> TokenLogprobs:
        result = TokenLogprobs([], [], [])
        num_logits = step.num_logits
        for offset in range(0, len(targets_N), self._max_logits):
            chunk = targets_N[offset : offset + self._max_logits]
            step.num_logits = self._round_up(len(chunk))
            index = np.full(step.num_logits, first_token, dtype=np.int32)
            index[: len(chunk)] = np.arange(first_token + offset, first_token + offset + len(chunk))
            step.logits_index[: step.num_logits] = torch.from_numpy(index)
            self._tell(row, step.num_logits)
            logits_SV = self._model.compute_logits(step)[: len(chunk)]
            self._limit(logits_SV)
            part = self._sampler.compute_prompt_logprobs(logits_SV, chunk, row)
            result.token_ids += part.token_ids
            result.logprobs += part.logprobs
            result.ranks += part.ranks
        step.num_logits = num_logits
        return result
