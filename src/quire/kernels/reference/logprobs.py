"""Reference of the logprobs of drawn tokens and of the most likely ones."""

import torch
from torch import Tensor

from quire.kernels.registry import kernel

MOST_ALTERNATIVES = 64
"""The most alternatives that `token_logprobs` is asked for."""


@kernel("token_logprobs", platform="any")
def token_logprobs(
    logits_SV: Tensor, index_N: Tensor, token_ids_N: Tensor, normalize: bool, values_NK: Tensor, ids_NK: Tensor, ranks_N
) -> None:
    logits_NV = logits_SV[index_N.long()]
    own_N1 = token_ids_N.long()[:, None]
    own_value_N1 = logits_NV.gather(1, own_N1)
    ranks_N.copy_((logits_NV > own_value_N1).sum(-1) + 1)
    # A stable sort: of equal logits the lower id comes first.
    values_NV, order_NV = torch.sort(logits_NV, dim=-1, descending=True, stable=True)
    count = values_NK.shape[1] - 1
    total_N1 = torch.logsumexp(logits_NV, dim=-1, keepdim=True) if normalize else 0.0
    values_NK.copy_(torch.cat((own_value_N1, values_NV[:, :count]), 1) - total_N1)
    ids_NK.copy_(torch.cat((own_N1, order_NV[:, :count]), 1))
