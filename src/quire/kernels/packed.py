"""Operations on matrices whose weights are small codes with a scale a group of columns, and on int8 matrices; what they take.

A packed weight's value is `(value of its code - zero) * scale`, where scale and zero belong to a row and a group of adjacent
columns. Nearly every weight-only format can be written so; which checkpoint becomes what is `quantization/`'s business.
Activations are not rounded, except by `int8_linear` and by kernels that say so. Products are summed in float32 (or int32).

Legend: T rows (tokens), N outputs, K inputs, G groups of K / G adjacent columns.
"""

import torch
from torch import Tensor

from quire.kernels.norm import gated, rms
from quire.kernels.registry import operation, reference
from quire.kernels.types import ExpertCodes, Int8Weight, PackedWeight

INT8_MAX = 127.0
INT8_MIN_SCALE = 1e-12
"""Scales are at least this, so that rows of zeros stay zeros."""


def code_bits(codes: Tensor) -> int:
    """4 or 8, by the type of a weight's codes."""
    return 4 if codes.dtype == torch.uint8 else 8


def unpack_nibbles(packed_NB: Tensor) -> Tensor:
    """uint8 [..., B] to uint8 [..., 2B]: the low half of each byte, then the high one."""
    return torch.stack((packed_NB & 15, packed_NB >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes_NK: Tensor) -> Tensor:
    """Codes of 0 to 15, [..., K], to uint8 [..., K/2]."""
    codes = codes_NK.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def dequantize(weight: PackedWeight) -> Tensor:
    """The weight's values, float32 [N, K], its columns in the input's order. Needs the plain layout."""
    codes, scale_NG = weight.plain()
    if code_bits(codes) == 4:
        codes = unpack_nibbles(codes)
    values_NK = codes.float() if weight.table is None else weight.table[codes.long()]
    values_NGC = values_NK.unflatten(1, (scale_NG.shape[1], -1))
    if weight.zero is not None:
        values_NGC = values_NGC - weight.zero[:, :, None]
    values_NK = (values_NGC * scale_NG[:, :, None]).flatten(1)
    if weight.perm is None:
        return values_NK
    ordered_NK = torch.empty_like(values_NK)
    ordered_NK[:, weight.perm.long()] = values_NK
    return ordered_NK


@operation
def pack_codes(weight: PackedWeight) -> PackedWeight:
    """Prepare a weight for `packed_linear`; its plain tensors may be taken over or dropped."""
    return weight


@operation
def pack_expert_codes(experts: list[PackedWeight], *, is_gated: bool) -> ExpertCodes | None:
    """One weight of all experts', for `moe_experts`; None where there is no kernel for such codes, or they are not alike.

    Args:
        experts: is emptied one by one, so that no more than one matrix is in memory twice; left as it is where None is returned.
        is_gated: the upper half of an expert's rows is the gate's.
    """
    return None


@operation
def packed_linear(x_TK: Tensor, weight: PackedWeight, out_TN: Tensor) -> None:
    """out = x @ weight.T (+ bias)."""
    out = x_TK.float() @ dequantize(weight).T
    out_TN.copy_(out if weight.bias is None else out + weight.bias)


@operation
def packed_linear_add(x_TK: Tensor, weight: PackedWeight, residual_TN: Tensor) -> None:
    """residual += x @ weight.T (+ bias)."""
    out_TN = torch.empty(residual_TN.shape, device=residual_TN.device)
    reference(packed_linear)(x_TK, weight, out_TN)
    residual_TN += out_TN


@operation
def packed_norm_linear_gated(
    x_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: PackedWeight,
    kind: str,
    out_TI: Tensor,
    scratch_TD: Tensor,
    scratch_T2I: Tensor,
) -> None:
    """As `ops.norm_linear_gated`, of a packed weight."""
    wide_T2I = torch.empty(scratch_T2I.shape, device=out_TI.device)
    reference(packed_linear)(rms(x_TD, norm_D, eps), weight, wide_T2I)
    out_TI.copy_(gated(wide_T2I, kind))


def quantize_rows(x_TK: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x / scale rounded to whole numbers of at most 127, in float32 [T, K]; scale [T])."""
    x = x_TK.float()
    if input_scale is None:
        scale = (x.abs().amax(-1) / INT8_MAX).clamp(min=INT8_MIN_SCALE)
    else:
        scale = input_scale.float().expand(x.shape[0])
    return (x / scale[:, None]).round().clamp(-INT8_MAX, INT8_MAX), scale


@operation
def pack_int8(weight: Int8Weight) -> Int8Weight:
    """Prepare a weight for `int8_linear`; its plain tensors may be taken over or dropped."""
    return weight


@operation
def int8_linear(x_TK: Tensor, weight: Int8Weight, out_TN: Tensor) -> None:
    """out = (q @ weight.data.T) * input scale * weight scale (+ bias), with q = round(x / input scale), to even at the half,
    kept within -127 and 127. The input scale is the weight's own, or each row's largest magnitude / 127."""
    if weight.data is None:
        raise ValueError("this weight was packed by another kernel: choose `pack_int8` and `int8_linear` together")
    quantized, scale = quantize_rows(x_TK, weight.input_scale)
    # Sums of products of whole numbers: exact in float64.
    sums = (quantized.double() @ weight.data.double().T).float()
    out = sums * scale[:, None] * weight.scale
    out_TN.copy_(out if weight.bias is None else out + weight.bias)
