"""Operations on matrices whose weights are float8 (e4m3, 3 bits of mantissa, up to 448), and what they take.

A weight's values are its float8 numbers times one float32 scale an output channel. Activations are multiplied either as
they are, or rounded to float8 with one scale a row: the row's largest magnitude becomes 448, or the scale is given.
Products are summed in float32.

Legend: T rows (tokens), N outputs, K inputs, D hidden, I intermediate.
"""

import torch
from torch import Tensor

from quire.kernels.norm import gated, rms
from quire.kernels.registry import operation
from quire.kernels.types import Fp8Scratch, Fp8Weight

FP8_MAX = 448.0
FP8_MIN_SCALE = 1e-12
"""Scales are at least this, so that rows of zeros stay zeros."""


def quantize(x_TK: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x / scale in float8 [T, K], scale [T])."""
    x = x_TK.float()
    if input_scale is None:
        largest = x.abs().amax(-1).clamp(min=FP8_MIN_SCALE * FP8_MAX)
        # A number beside a tensor would be multiplied with as its reciprocal, which is rounded once more.
        limit = torch.full_like(largest, FP8_MAX)
        scale, inverse = largest / limit, limit / largest
    else:
        scale = input_scale.float().expand(x.shape[0])
        inverse = torch.ones_like(scale) / scale
    # torch turns what is out of range into NaN.
    return (x * inverse[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def dequantize(weight: Fp8Weight) -> Tensor:
    """The weight's values, float32 [N, K]."""
    assert weight.data is not None
    return weight.data.float() * weight.scale[:, None]


def _product(x_TK: Tensor, weight: Fp8Weight) -> Tensor:
    assert weight.data is not None
    quantized, scale = quantize(x_TK, weight.input_scale)
    out = quantized.float() @ weight.data.float().T * scale[:, None] * weight.scale
    return out if weight.bias is None else out + weight.bias


@operation
def fp8_quantize(x_TK: Tensor, out_TK: Tensor, scale_T: Tensor, input_scale: Tensor | None = None) -> None:
    """out = x / scale in float8, beyond its range the largest; scale = input_scale, or max |x| / 448 of each row."""
    quantized, scale = quantize(x_TK, input_scale)
    out_TK.copy_(quantized)
    scale_T.copy_(scale)


@operation
def fp8_linear(x_TK: Tensor, weight: Fp8Weight, out_TN: Tensor, scratch: Fp8Scratch) -> None:
    """out = x @ weight.T (+ bias)."""
    out_TN.copy_(_product(x_TK, weight))


@operation
def fp8_norm_linear(
    x_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: Fp8Weight,
    out_TN: Tensor,
    scratch: Fp8Scratch,
) -> None:
    """out = rms_norm(x) @ weight.T (+ bias); x stays as it is."""
    out_TN.copy_(_product(rms(x_TD, norm_D, eps), weight))


@operation
def fp8_norm_linear_gated(
    x_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: Fp8Weight,
    kind: str,
    out_TI: Tensor,
    wide_T2I: Tensor,
    scratch: Fp8Scratch,
) -> None:
    """y = rms_norm(x) @ weight.T (+ bias), then out = act(y[:, :I]) * y[:, I:]. x stays as it is; `wide` may be
    overwritten. Kinds are those of `ops.gated_activation`."""
    out_TI.copy_(gated(_product(rms(x_TD, norm_D, eps), weight), kind))


@operation
def fp8_linear_add(x_TK: Tensor, weight: Fp8Weight, residual_TN: Tensor, delta_TN: Tensor, scratch: Fp8Scratch) -> None:
    """residual += x @ weight.T (+ bias); `delta` may be overwritten."""
    residual_TN.copy_(residual_TN.float() + _product(x_TK, weight))


@operation
def fp8_gated_mlp(
    residual_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    gate_up: Fp8Weight,
    kind: str,
    down: Fp8Weight,
    wide_T2I: Tensor,
    narrow_TI: Tensor,
    delta_TD: Tensor,
    scratch: Fp8Scratch,
) -> None:
    """residual += down(act(gate) * up), with gate and up of rms_norm(residual). `wide`, `narrow`, `delta` may be
    overwritten."""
    inner = gated(_product(rms(residual_TD, norm_D, eps), gate_up), kind)
    residual_TD.copy_(residual_TD.float() + _product(inner, down))
