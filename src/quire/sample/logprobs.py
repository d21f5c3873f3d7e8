"""Log probabilities of given tokens, their ranks, and the most likely alternatives.

Legend: N positions, V vocabulary, K alternatives.
"""

import dataclasses

import numpy as np
import torch


@dataclasses.dataclass(slots=True)
class PositionLogprobs:
    """Logprobs of consecutive positions: for each, the token itself first, then the most likely tokens in descending order.
    `ranks` is the token's own 1-based rank in the vocabulary."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]

    def pick(self, index: int) -> "PositionLogprobs":
        """One of the positions."""
        return PositionLogprobs([self.token_ids[index]], [self.logprobs[index]], [self.ranks[index]])


def compute_logprobs(
    logits_NV: torch.Tensor, token_ids_N: np.ndarray, count: int, *, normalize: bool = True
) -> PositionLogprobs:
    """Logprobs of `token_ids` and of the `count` most likely tokens (at most the vocabulary) at each position.

    Args:
        normalize: False gives logits in place of log probabilities.
    """
    logits_NV = logits_NV.float()
    wanted = torch.from_numpy(token_ids_N.astype(np.int64)).to(logits_NV.device)[:, None]
    own_N1 = logits_NV.gather(1, wanted)
    ranks = (logits_NV > own_N1).sum(-1) + 1
    if count:
        top = torch.topk(logits_NV, min(count, logits_NV.shape[1]), dim=-1)
        values, ids = torch.cat((own_N1, top.values), dim=1), torch.cat((wanted, top.indices), dim=1)
    else:
        values, ids = own_N1, wanted
    if normalize:
        values = values - torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    return PositionLogprobs(ids.tolist(), values.tolist(), ranks.tolist())
