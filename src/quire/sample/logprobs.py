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


def gather_named(
    logits_NV: torch.Tensor, token_ids_N: torch.Tensor, named_NK: torch.Tensor, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs of the tokens themselves and of those that are named for each position: values and ids, [N, K + 1], with the
    token itself first; and its rank, [N]. Waits for nothing."""
    ids_NK = torch.cat((token_ids_N.long()[:, None], named_NK.long()), dim=1)
    values_NK = logits_NV.gather(1, ids_NK)
    ranks_N = (logits_NV > values_NK[:, :1]).sum(-1) + 1
    if normalize:
        values_NK = values_NK - torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    return values_NK, ids_NK, ranks_N


def pick_rows(
    rows_N: np.ndarray, counts_N: np.ndarray, values_NK: torch.Tensor, ids_NK: torch.Tensor, ranks_N: torch.Tensor
) -> dict[int, PositionLogprobs]:
    """Each row's own logprob and the first `count` of its alternatives, from tensors on the host."""
    values, ids, ranks = values_NK.tolist(), ids_NK.tolist(), ranks_N.tolist()
    return {
        row: PositionLogprobs([ids[number][: count + 1]], [values[number][: count + 1]], [ranks[number]])
        for number, (row, count) in enumerate(zip(rows_N.tolist(), counts_N.tolist(), strict=True))
    }


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
