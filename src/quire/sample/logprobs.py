"""Log probabilities of sampled tokens, their ranks, and the most likely alternatives.

They are computed on the device, without waiting for it, and handed out when their values have arrived on the host. Knows logits,
tokens and how many alternatives rows want. Knows nothing of how tokens are sampled.

Legend: S rows of the batch, N rows that want logprobs, V vocabulary, K one more than the alternatives.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels import ops
from quire.platforms.interface import DeviceMemory
from quire.request import TokenLogprobs
from quire.sample.features import FEW_LOGPROBS
from quire.sample.sampling_rows import SamplingRows

IntArray = npt.NDArray[np.int32]


@dataclasses.dataclass
class LogprobGroup:
    """Rows whose logprobs were computed together.

    Attributes:
        rows_N: their rows. counts_N: how many alternatives each wants.
        values_NK, ids_NK, ranks_N: device tensors; the token itself comes first.
    """

    rows_N: IntArray
    counts_N: IntArray
    values_NK: Tensor
    ids_NK: Tensor
    ranks_N: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `entries` needs on the host, in this order."""
        return self.values_NK, self.ids_NK, self.ranks_N

    def entries(self, values_NK: Tensor, ids_NK: Tensor, ranks_N: Tensor) -> dict[int, TokenLogprobs]:
        """Each row's own logprob and as many alternatives as it wants."""
        values, ids, ranks = values_NK.tolist(), ids_NK.tolist(), ranks_N.tolist()
        return {
            row: TokenLogprobs([ids[number][: count + 1]], [values[number][: count + 1]], [ranks[number]])
            for number, (row, count) in enumerate(zip(self.rows_N.tolist(), self.counts_N.tolist(), strict=True))
        }


def compute_groups(
    logits_SV: Tensor,
    index_N: IntArray,
    rows_N: IntArray,
    table: SamplingRows,
    token_ids_N: Tensor,
    memory: DeviceMemory,
    *,
    normalize: bool,
) -> list[LogprobGroup]:
    """Enqueue the work; nothing is waited for.

    Args:
        index_N: where each row's logits are among those given.
        table: what the rows want.
        token_ids_N: sampled tokens, on the device.
        normalize: False gives logits in place of log probabilities.
    """
    groups: list[LogprobGroup] = []
    counts_N = table.num_logprobs_R[rows_N]
    is_named_N = table.is_named(rows_N)
    few, many = ~is_named_N & (counts_N <= FEW_LOGPROBS), ~is_named_N & (counts_N > FEW_LOGPROBS)

    def compute_named(
        logits_SV: Tensor, index_N: Tensor, token_ids_N: Tensor, count: int, normalize: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        del count
        named_NK = memory.upload(table.named_table(rows_N[is_named_N]))
        ids_NK = torch.cat((token_ids_N.long()[:, None], named_NK.long()), dim=1)
        return _gather(logits_SV.index_select(0, index_N), ids_NK, normalize)

    kinds = [
        (few, _compute_few),
        (is_named_N, compute_named),
        *((many & (counts_N == count), _compute_many) for count in np.unique(counts_N[many])),
    ]
    for is_member_N, compute in kinds:
        members = np.flatnonzero(is_member_N)
        if len(members):
            tokens = token_ids_N
            if len(members) < len(index_N):
                tokens = token_ids_N.index_select(0, memory.upload(members))
            where = memory.upload(index_N[members].astype(np.int32))
            most = int(counts_N[members].max())
            tensors = compute(logits_SV, where, tokens, most, normalize)
            groups.append(LogprobGroup(rows_N[members], counts_N[members], *tensors))
    return groups


def compute_position_logprobs(
    logits_NV: Tensor, token_ids_N: IntArray, count: int, normalize: bool, memory: DeviceMemory
) -> TokenLogprobs:
    """Logprobs of given tokens and of the `count` most likely ones at each position. Waits for them."""
    index_N = memory.upload(np.arange(len(token_ids_N), dtype=np.int32))
    compute = _compute_few if count <= FEW_LOGPROBS else _compute_many
    values_NK, ids_NK, ranks_N = compute(logits_NV, index_N, memory.upload(token_ids_N), count, normalize)
    return TokenLogprobs(ids_NK.tolist(), values_NK.tolist(), ranks_N.tolist())


def _compute_few(
    logits_SV: Tensor, index_N: Tensor, token_ids_N: Tensor, count: int, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, ids [N, count + 1] and ranks [N] of tokens and their `count` likeliest alternatives, at most `FEW_LOGPROBS`."""
    number, device = len(index_N), logits_SV.device
    values_NK = torch.empty((number, count + 1), dtype=torch.float32, device=device)
    ids_NK = torch.empty((number, count + 1), dtype=torch.int32, device=device)
    ranks_N = torch.empty(number, dtype=torch.int32, device=device)
    ops.token_logprobs(logits_SV, index_N, token_ids_N, normalize, values_NK, ids_NK, ranks_N)
    return values_NK, ids_NK, ranks_N


def _compute_many(
    logits_SV: Tensor, index_N: Tensor, token_ids_N: Tensor, count: int, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logits_NV = logits_SV.index_select(0, index_N)
    top_NK = torch.topk(logits_NV, count, dim=-1).indices
    return _gather(logits_NV, torch.cat((token_ids_N.long()[:, None], top_NK), 1), normalize)


def _gather(logits_NV: Tensor, ids_NK: Tensor, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values and ids of these tokens, and the first one's rank."""
    values_NK = logits_NV.gather(1, ids_NK)
    ranks_N = (logits_NV > values_NK[:, :1]).sum(-1) + 1
    if normalize:
        values_NK = values_NK - torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    return values_NK, ids_NK, ranks_N
