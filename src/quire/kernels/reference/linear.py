"""Reference linear layers and embeddings, on the plain [N, K] layout."""

import torch

from quire.kernels.ops import LinearWeight
from quire.kernels.registry import kernel


@kernel("pack_linear", platform="any")
def pack_linear(weight_NK, bias_N=None) -> LinearWeight:
    bias = None if bias_N is None else bias_N.float()
    return LinearWeight(weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype, weight_NK.contiguous(), None, bias)


@kernel("linear", platform="any")
def linear(x_TK, weight, out_TN) -> None:
    out = torch.nn.functional.linear(x_TK.to(weight.dtype), weight.data).float()
    out_TN.copy_(out if weight.bias is None else out + weight.bias)


@kernel("embedding", platform="any")
def embedding(ids_T, weight, out_TD, scale=1.0) -> None:
    out_TD.copy_(weight.data[ids_T.long()].float() * scale)


@kernel("add_embedding", platform="any")
def add_embedding(ids_T, weight, out_TD) -> None:
    out_TD.add_(weight.data[ids_T.long()].to(out_TD.dtype))
