"""Norms, activations and other operations on single rows.

Legend: T tokens, D hidden, I intermediate, G norms side by side in a row, H values of one norm, C columns, L positions,
S rows that are asked for, V vocabulary.
"""

import math

import torch
from torch import Tensor

from quire.kernels.registry import operation

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
"""Activations by name. Compiled kernels know one by its place here: a new one comes last."""


def rms(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The RMS norm of rows, in float32."""
    x = x_TD.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight_D.float()


def gated(y_T2I: Tensor, kind: str) -> Tensor:
    """act(y[:, :I]) * y[:, I:]."""
    gate, up = y_T2I.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


def _with_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return x.float()
    residual.add_(x)
    return residual.float()


@operation
def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    out_TD: Tensor,
    residual_TD: Tensor | None = None,
) -> None:
    """With a residual: residual += x first (in place), and the sum is normed. weight is float32. `out` may be `x`."""
    out_TD.copy_(rms(_with_residual(x_TD, residual_TD), weight_D, eps))


@operation
def layer_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    out_TD: Tensor,
    residual_TD: Tensor | None = None,
) -> None:
    """As `rms_norm`, with mean and bias."""
    x = _with_residual(x_TD, residual_TD)
    bias = None if bias_D is None else bias_D.float()
    out_TD.copy_(torch.nn.functional.layer_norm(x, x.shape[-1:], weight_D.float(), bias, eps))


@operation
def head_norm(x_TGH: Tensor, weight_GH: Tensor, bias_GH: Tensor | None, eps: float, subtract_mean: bool) -> None:
    """Norm each H values of the rows of x [T, G * H] in place; rows may lie apart. RMS norm, or layer norm where the mean is
    subtracted. Weight and bias are float32."""
    groups, size = weight_GH.shape
    x = x_TGH.float().reshape(-1, groups, size)
    if subtract_mean:
        x = x - x.mean(-1, keepdim=True)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_GH
    x_TGH.copy_((normed if bias_GH is None else normed + bias_GH).view(x_TGH.shape))


@operation
def add(x_TD: Tensor, out_TD: Tensor, scale: float = 1.0) -> None:
    """out += x * scale."""
    out_TD.add_(x_TD, alpha=scale)


@operation
def gated_activation(x_T2I: Tensor, kind: str, out_TI: Tensor) -> None:
    """out = act(x[:, :I]) * x[:, I:]; kind is a name in `ACTIVATIONS`."""
    out_TI.copy_(gated(x_T2I.float(), kind))


@operation
def activation(x_TI: Tensor, kind: str) -> None:
    """x = act(x), in place; kinds as above."""
    x_TI.copy_(ACTIVATIONS[kind](x_TI.float()))


XIELU = "xielu"
"""An activation with two learned numbers (Huang and Schlag 2024), each above 0 by a softplus: a * x^2 + x / 2 above zero, and
(b + 1/2) * (exp(x) - 1 - x) + x / 2 below."""
BETA = 0.5


def set_alpha(alphas_2: Tensor, is_positive: bool, stored_1: Tensor) -> None:
    """Put one of the two numbers, as a checkpoint has it before its softplus, in its place."""
    alpha_1 = torch.nn.functional.softplus(stored_1.float())
    alphas_2[0 if is_positive else 1] = alpha_1[0] + (0.0 if is_positive else BETA)


@operation
def xielu(x_TI: Tensor, alphas_2: Tensor) -> None:
    """x = xIELU(x), in place; alphas: float32 a, then b + 1/2."""
    x, (positive, negative) = x_TI.float(), alphas_2
    below = x.clamp(max=0.0)
    x_TI.copy_(positive * x.clamp(min=0.0).square() + negative * (torch.expm1(below) - below) + 0.5 * x)


@operation
def clip(x_TC: Tensor, limit: float) -> None:
    """Keep the values of rows, which may lie apart, within plus and minus the limit; in place."""
    x_TC.clamp_(-limit, limit)


@operation
def scale_rows(x_TC: Tensor, table_L: Tensor, index_T: Tensor) -> None:
    """x[t] *= table[index[t]], in place; rows may lie apart. The table is float32, the index int32."""
    x_TC.mul_(table_L[index_T.long(), None])


@operation
def gather_rows(x_TD: Tensor, index_S: Tensor, out_SD: Tensor) -> None:
    """out[s] = x[index[s]]; index is int32."""
    out_SD.copy_(x_TD[index_S.long()])


@operation
def scale_and_cap(x_TV: Tensor, scale: float, soft_cap: float) -> None:
    """x = x * scale, then soft_cap * tanh(x / soft_cap) if soft_cap > 0; in place (logits)."""
    if scale != 1.0:
        x_TV.mul_(scale)
    if soft_cap > 0:
        x_TV.div_(soft_cap).tanh_().mul_(soft_cap)


@operation
def sigmoid_gate(x_TI: Tensor, gate_TG: Tensor) -> None:
    """x *= sigmoid(gate), in place: one gate a row, or one a value. The gate's rows may lie apart."""
    x_TI.copy_(x_TI.float() * gate_TG.float().sigmoid())
