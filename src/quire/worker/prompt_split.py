"""A long step over ranks that share its tokens (`--prefill-context-parallel-size`): each computes the layers for its own.

Steps with few tokens are computed whole on each of these ranks, as ever. Knows a step's tensors; `attention/prompt_parallel.py`
brings keys and values to the others.
"""

import dataclasses

import torch

from quire.attention.prompt_parallel import PromptShare
from quire.distributed.communicator import Communicator
from quire.layers.decoder import Decoder
from quire.layers.interface import StepInputs

LEAST_TOKENS = 16
"""Tokens a rank from which on a step is divided."""


class PromptSplit:
    """One rank's part.

    Args:
        ranks: those that share the tokens of prompts.
    """

    def __init__(self, model: Decoder, ranks: Communicator) -> None:
        self._model, self.ranks = model, ranks

        self.least = LEAST_TOKENS * ranks.size

    def takes(self, step: StepInputs) -> bool:
        """Whether a step is divided, of which nobody wants the hidden states of all tokens, and all are text."""
        return step.num_tokens >= self.least and step.attention[0].max_query_len > 1

    def forward(self, step: StepInputs) -> StepInputs:
        """Run the layers. Returns a step of the tokens that need logits alone, whose residual every rank has now."""
        model, share = self._model, PromptShare.of(step.num_tokens, self.ranks.rank, self.ranks.size)
        local = self._local(step, share)
        model.begin_step(local)
        for metadata in local.attention:
            model.attention_backend.begin_step(metadata)
        residual_TD = model.forward(local)
        count = step.num_logits
        index_S = step.logits_index[:count] - share.first
        is_mine_S1 = ((index_S >= 0) & (index_S < local.num_tokens))[:, None]
        rows_SD = residual_TD[index_S.clamp(0, local.num_tokens - 1)]
        rows_SD = torch.where(is_mine_S1, rows_SD, torch.zeros_like(rows_SD))
        self.ranks.all_reduce(rows_SD)
        model.workspace.tokens(count).residual_TD.copy_(rows_SD)
        few = torch.arange(count, dtype=step.logits_index.dtype, device=index_S.device)
        return dataclasses.replace(step, num_tokens=count, logits_index=few, sampled=None)

    def _local(self, step: StepInputs, share: PromptShare) -> StepInputs:
        first, last, size = share.first, share.last, self.ranks.size
        attention = []
        for metadata in step.attention:
            slots_RM = metadata.slot_mapping.new_zeros(size * share.most)  # places that nobody reads
            slots_RM[: step.num_tokens] = metadata.slot_mapping[: step.num_tokens].clamp(min=0)
            attention.append(share.describe(metadata, slots_RM.long().view(size, -1)))
        return dataclasses.replace(
            step,
            input_ids=step.input_ids[first:last],
            positions=step.positions[first:last],
            axes=None if step.axes is None else step.axes[first:last],
            attention=attention,
            num_tokens=last - first,
            sampled=None,
        )
