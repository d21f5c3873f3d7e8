"""Logprobs of a batch on a device that works beside the host: computed there, handed out when they have arrived.

Knows logits, drawn tokens and how many alternatives rows want. Knows nothing of how tokens are drawn.

Legend: S rows of the batch, N rows that want logprobs, V vocabulary, K one more than the alternatives.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels import ops
from quire.sample.device_tables import to_device
from quire.sample.features import FEW_LOGPROBS
from quire.sample.logprobs import PositionLogprobs, gather_named, pick_rows
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
    values_NK: torch.Tensor
    ids_NK: torch.Tensor
    ranks_N: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `entries` needs on the host, in this order."""
        return self.values_NK, self.ids_NK, self.ranks_N

    def entries(
        self, values_NK: torch.Tensor, ids_NK: torch.Tensor, ranks_N: torch.Tensor
    ) -> dict[int, PositionLogprobs]:
        """Each row's logprobs."""
        return pick_rows(self.rows_N, self.counts_N, values_NK, ids_NK, ranks_N)


def compute_groups(
    logits_SV: torch.Tensor, index_N: IntArray, rows_N: IntArray, table: SamplingRows, token_ids_N: torch.Tensor, *,
    normalize: bool,
) -> list[LogprobGroup]:  # fmt: skip
    """Enqueue the work; nothing is waited for.

    Args:
        index_N: where each row's logits are among those given.
        table: what the rows want.
        token_ids_N: drawn tokens, on the device.
    """
    groups: list[LogprobGroup] = []
    counts_N = table.num_logprobs_R[rows_N]
    is_named_N = table.is_named(rows_N)
    few, many = ~is_named_N & (counts_N <= FEW_LOGPROBS), ~is_named_N & (counts_N > FEW_LOGPROBS)

    def compute_named(
        logits_SV: torch.Tensor, index_N: torch.Tensor, token_ids_N: torch.Tensor, count: int, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        del count
        named_NK = to_device(table.named_table(rows_N[is_named_N]), logits_SV.device)
        return gather_named(logits_SV.index_select(0, index_N), token_ids_N, named_NK, normalize=normalize)

    kinds = [
        (few, compute_few),
        (is_named_N, compute_named),
        *((many & (counts_N == count), _compute_many) for count in np.unique(counts_N[many])),
    ]
    for is_member_N, compute in kinds:
        members = np.flatnonzero(is_member_N)
        if len(members):
            device = logits_SV.device
            tokens = token_ids_N
            if len(members) < len(index_N):
                tokens = token_ids_N.index_select(0, to_device(members, device))
            where = to_device(index_N[members].astype(np.int32), device)
            most = int(counts_N[members].max())
            tensors = compute(logits_SV, where, tokens, most, normalize)
            groups.append(LogprobGroup(rows_N[members], counts_N[members], *tensors))
    return groups


def compute_few(
    logits_SV: torch.Tensor, index_N: torch.Tensor, token_ids_N: torch.Tensor, count: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, ids [N, count + 1] and ranks [N] of tokens and their `count` likeliest alternatives, at most `FEW_LOGPROBS`."""
    number, device = len(index_N), logits_SV.device
    values_NK = torch.empty((number, count + 1), dtype=torch.float32, device=device)
    ids_NK = torch.empty((number, count + 1), dtype=torch.int32, device=device)
    ranks_N = torch.empty(number, dtype=torch.int32, device=device)
    ops.token_logprobs(logits_SV, index_N, token_ids_N, normalize, values_NK, ids_NK, ranks_N)
    return values_NK, ids_NK, ranks_N


def _compute_many(
    logits_SV: torch.Tensor, index_N: torch.Tensor, token_ids_N: torch.Tensor, count: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits_NV = logits_SV.index_select(0, index_N)
    own_N1 = token_ids_N.long()[:, None]
    own_value_N1 = logits_NV.gather(1, own_N1)
    top = torch.topk(logits_NV, count, dim=-1)
    values_NK = torch.cat((own_value_N1, top.values), 1)
    if normalize:
        values_NK -= torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    ranks_N = (logits_NV > own_value_N1).sum(-1) + 1
    return values_NK, torch.cat((own_N1, top.indices), 1), ranks_N
