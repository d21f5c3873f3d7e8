"""Reference operations on packed and int8 weights: values are made whole, products are float32."""

import torch
from torch import Tensor

from quire.kernels.packed import INT8_MAX, INT8_MIN_SCALE, ExpertCodes, Int8Weight, PackedWeight, dequantize
from quire.kernels.reference.elementwise import ACTIVATIONS
from quire.kernels.registry import kernel


@kernel("pack_codes", platform="any")
def pack_codes(weight: PackedWeight) -> PackedWeight:
    return weight


@kernel("pack_expert_codes", platform="any")
def pack_expert_codes(experts: list[PackedWeight], *, is_gated: bool) -> ExpertCodes | None:
    return None


@kernel("packed_linear", platform="any")
def packed_linear(x_TK: Tensor, weight: PackedWeight, out_TN: Tensor) -> None:
    out = x_TK.float() @ dequantize(weight).T
    out_TN.copy_(out if weight.bias is None else out + weight.bias)


@kernel("packed_linear_add", platform="any")
def packed_linear_add(x_TK: Tensor, weight: PackedWeight, residual_TN: Tensor) -> None:
    out_TN = torch.empty(residual_TN.shape, device=residual_TN.device)
    packed_linear(x_TK, weight, out_TN)
    residual_TN += out_TN


@kernel("packed_norm_linear_gated", platform="any")
def packed_norm_linear_gated(
    x_TD: Tensor, norm_D: Tensor, eps: float, weight: PackedWeight, kind: str, out_TI: Tensor, scratch_TD: Tensor,
    scratch_T2I: Tensor,
) -> None:  # fmt: skip
    x, wide_T2I = x_TD.float(), torch.empty(scratch_T2I.shape, device=out_TI.device)
    packed_linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm_D, weight, wide_T2I)
    gate, up = wide_T2I.chunk(2, dim=-1)
    out_TI.copy_(ACTIVATIONS[kind](gate) * up)


def quantize_rows(x_TK: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x / scale rounded to whole numbers of at most 127, in float32 [T, K]; scale [T])."""
    x = x_TK.float()
    if input_scale is None:
        scale = (x.abs().amax(-1) / INT8_MAX).clamp(min=INT8_MIN_SCALE)
    else:
        scale = input_scale.float().expand(x.shape[0])
    return (x / scale[:, None]).round().clamp(-INT8_MAX, INT8_MAX), scale


@kernel("pack_int8", platform="any")
def pack_int8(weight: Int8Weight) -> Int8Weight:
    return weight


@kernel("int8_linear", platform="any")
def int8_linear(x_TK: Tensor, weight: Int8Weight, out_TN: Tensor) -> None:
    if weight.data is None:
        raise ValueError("this weight was packed by another kernel: choose `pack_int8` and `int8_linear` together")
    quantized, scale = quantize_rows(x_TK, weight.input_scale)
    # Sums of products of whole numbers: exact in float64.
    sums = (quantized.double() @ weight.data.double().T).float()
    out = sums * scale[:, None] * weight.scale
    out_TN.copy_(out if weight.bias is None else out + weight.bias)
