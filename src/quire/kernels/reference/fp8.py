"""Reference operations on float8 weights: every input is rounded to float8, every product is exact, sums are float32."""

import torch
from torch import Tensor

from quire.kernels.fp8 import FP8_MAX, FP8_MIN_SCALE, Fp8Scratch, Fp8Weight
from quire.kernels.reference.elementwise import ACTIVATIONS
from quire.kernels.registry import kernel


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


def _normed(x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    x = x_TD.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm_D.float()


def _gated(y_T2I: Tensor, kind: str) -> Tensor:
    gate, up = y_T2I.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


@kernel("fp8_quantize", platform="any")
def fp8_quantize(x_TK: Tensor, out_TK: Tensor, scale_T: Tensor, input_scale: Tensor | None = None) -> None:
    quantized, scale = quantize(x_TK, input_scale)
    out_TK.copy_(quantized)
    scale_T.copy_(scale)


@kernel("fp8_linear", platform="any")
def fp8_linear(x_TK: Tensor, weight: Fp8Weight, out_TN: Tensor, scratch: Fp8Scratch) -> None:
    out_TN.copy_(_product(x_TK, weight))


@kernel("fp8_norm_linear", platform="any")
def fp8_norm_linear(
    x_TD: Tensor, norm_D: Tensor, eps: float, weight: Fp8Weight, out_TN: Tensor, scratch: Fp8Scratch
) -> None:
    out_TN.copy_(_product(_normed(x_TD, norm_D, eps), weight))


@kernel("fp8_norm_linear_gated", platform="any")
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
    out_TI.copy_(_gated(_product(_normed(x_TD, norm_D, eps), weight), kind))


@kernel("fp8_linear_add", platform="any")
def fp8_linear_add(x_TK: Tensor, weight: Fp8Weight, residual_TN: Tensor, delta_TN: Tensor, scratch: Fp8Scratch) -> None:
    residual_TN.copy_(residual_TN.float() + _product(x_TK, weight))


@kernel("fp8_gated_mlp", platform="any")
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
    gated = _gated(_product(_normed(residual_TD, norm_D, eps), gate_up), kind)
    residual_TD.copy_(residual_TD.float() + _product(gated, down))
