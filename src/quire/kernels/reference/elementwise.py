"""Reference norms, activations, gathers."""

import math

import torch
from torch import Tensor

from quire.kernels.registry import kernel

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_10": lambda x: torch.nn.functional.gelu(x).clamp(-10.0, 10.0),
    "relu6": torch.nn.functional.relu6,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": torch.nn.functional.mish,
    "hardswish": torch.nn.functional.hardswish,
    "linear": lambda x: x,
    "laplace": lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0)))),
    "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
}


def _with_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return x.float()
    residual.add_(x)
    return residual.float()


@kernel("rms_norm", platform="any")
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor, residual_TD: Tensor | None = None) -> None:
    x = _with_residual(x_TD, residual_TD)
    out_TD.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight_D.float())


@kernel("layer_norm", platform="any")
def layer_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    out_TD: Tensor,
    residual_TD: Tensor | None = None,
) -> None:
    x = _with_residual(x_TD, residual_TD)
    bias = None if bias_D is None else bias_D.float()
    out_TD.copy_(torch.nn.functional.layer_norm(x, x.shape[-1:], weight_D.float(), bias, eps))


@kernel("head_norm", platform="any")
def head_norm(x_TGH: Tensor, weight_GH: Tensor, bias_GH: Tensor | None, eps: float, subtract_mean: bool) -> None:
    groups, size = weight_GH.shape
    x = x_TGH.float().reshape(-1, groups, size)
    if subtract_mean:
        x = x - x.mean(-1, keepdim=True)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_GH
    x_TGH.copy_((normed if bias_GH is None else normed + bias_GH).view(x_TGH.shape))


@kernel("add", platform="any")
def add(x_TD: Tensor, out_TD: Tensor, scale: float = 1.0) -> None:
    out_TD.add_(x_TD, alpha=scale)


@kernel("gated_activation", platform="any")
def gated_activation(x_T2I: Tensor, kind: str, out_TI: Tensor) -> None:
    gate, up = x_T2I.float().chunk(2, dim=-1)
    out_TI.copy_(ACTIVATIONS[kind](gate) * up)


@kernel("activation", platform="any")
def activation(x_TI: Tensor, kind: str) -> None:
    x_TI.copy_(ACTIVATIONS[kind](x_TI.float()))


@kernel("xielu", platform="any")
def xielu(x_TI: Tensor, alphas_2: Tensor) -> None:
    x, (positive, negative) = x_TI.float(), alphas_2
    below = x.clamp(max=0.0)
    x_TI.copy_(positive * x.clamp(min=0.0).square() + negative * (torch.expm1(below) - below) + 0.5 * x)


@kernel("clip", platform="any")
def clip(x_TC: Tensor, limit: float) -> None:
    x_TC.clamp_(-limit, limit)


@kernel("scale_rows", platform="any")
def scale_rows(x_TC: Tensor, table_L: Tensor, index_T: Tensor) -> None:
    x_TC.mul_(table_L[index_T.long(), None])


@kernel("gather_rows", platform="any")
def gather_rows(x_TD: Tensor, index_S: Tensor, out_SD: Tensor) -> None:
    out_SD.copy_(x_TD[index_S.long()])


@kernel("scale_and_cap", platform="any")
def scale_and_cap(x_TV: Tensor, scale: float, soft_cap: float) -> None:
    if scale != 1.0:
        x_TV.mul_(scale)
    if soft_cap > 0:
        x_TV.div_(soft_cap).tanh_().mul_(soft_cap)


@kernel("argmax", platform="any")
def argmax(logits_SV: Tensor, out_S: Tensor) -> None:
    out_S.copy_(logits_SV.argmax(-1))
