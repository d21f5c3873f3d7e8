"""Reference linear layers and embeddings, on the plain [N, K] layout."""

import torch
from torch import Tensor

from quire.kernels.ops import LinearWeight
from quire.kernels.reference.elementwise import ACTIVATIONS
from quire.kernels.registry import kernel


def _plain(weight: LinearWeight) -> Tensor:
    if weight.data is None:
        raise ValueError(
            "this weight was packed by another kernel: choose `linear`, `embedding` and `pack_linear` together"
        )
    return weight.data


@kernel("pack_linear", platform="any")
def pack_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> LinearWeight:
    bias = None if bias_N is None else bias_N.float()
    return LinearWeight(weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype, weight_NK.contiguous(), None, bias)


@kernel("linear", platform="any")
def linear(x_TK: Tensor, weight: LinearWeight, out_TN: Tensor) -> None:
    out = torch.nn.functional.linear(x_TK.to(weight.dtype), _plain(weight)).float()
    out_TN.copy_(out if weight.bias is None else out + weight.bias)


def _normed_product(x_TD: Tensor, norm_D: Tensor, eps: float, weight: LinearWeight) -> Tensor:
    x = x_TD.float()
    normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm_D.float()).to(x_TD.dtype)
    out = torch.nn.functional.linear(normed.to(weight.dtype), _plain(weight)).float()
    return out if weight.bias is None else out + weight.bias


@kernel("norm_linear", platform="any")
def norm_linear(
    x_TD: Tensor, norm_D: Tensor, eps: float, weight: LinearWeight, out_TN: Tensor, scratch_TD: Tensor
) -> None:
    out_TN.copy_(_normed_product(x_TD, norm_D, eps, weight))


@kernel("norm_linear_gated", platform="any")
def norm_linear_gated(
    x_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: LinearWeight,
    kind: str,
    out_TI: Tensor,
    scratch_TD: Tensor,
    scratch_T2I: Tensor,
) -> None:
    gate, up = _normed_product(x_TD, norm_D, eps, weight).chunk(2, dim=-1)
    out_TI.copy_(ACTIVATIONS[kind](gate) * up)


@kernel("linear_add", platform="any")
def linear_add(x_TK: Tensor, weight: LinearWeight, residual_TN: Tensor) -> None:
    out = torch.nn.functional.linear(x_TK.to(weight.dtype), _plain(weight)).float()
    residual_TN.copy_(residual_TN.float() + (out if weight.bias is None else out + weight.bias))


@kernel("embedding", platform="any")
def embedding(ids_T: Tensor, weight: LinearWeight, out_TD: Tensor, scale: float = 1.0) -> None:
    out_TD.copy_(_plain(weight)[ids_T.long()].float() * scale)


@kernel("add_embedding", platform="any")
def add_embedding(ids_T: Tensor, weight: LinearWeight, out_TD: Tensor) -> None:
    out_TD.add_(_plain(weight)[ids_T.long()].to(out_TD.dtype))
