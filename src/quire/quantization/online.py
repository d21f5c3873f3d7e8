"""A plain checkpoint's matrices rounded to small integers when they are loaded.

Int8: symmetric, the largest magnitude of a group of 128 columns becomes 127. Int4: from a group's smallest to its largest value
in 15 steps, in groups of 64 columns, or of 32 where that lowers the matrix's squared error by much.
"""

import dataclasses

import torch

from quire.kernels.packed import dequantize
from quire.kernels.types import PackedWeight
from quire.layers.linear import Decoded
from quire.quantization.codes import packed_weight
from quire.quantization.scheme import Form

GROUP8 = 128
GROUPS4 = (64, 32)
FINER_IF_BELOW = 0.7
"""Groups of 32 lower the squared error of normally distributed weights to 0.8 of that of groups of 64, which is not worth
their bytes (6 bits a weight instead of 5); of weights with outliers to less."""
INT8_ONLINE, INT4_ONLINE = Form("packed", 8, GROUP8), Form("packed", 4, GROUPS4[1], True)


def round_to_int8(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype) -> Decoded:
    """A packed weight of 8 bits."""
    outputs, inputs = weight_NK.shape
    groups = _grouped(weight_NK, GROUP8)
    scale_NG = _half(groups.abs().amax(-1) / 127)
    codes = (groups / scale_NG[..., None]).round().clamp(-127, 127).to(torch.int8).reshape(outputs, inputs)
    return PackedWeight(outputs, inputs, dtype, codes, bias=bias_N, scale=scale_NG)


def round_to_int4(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype) -> Decoded:
    """A packed weight of 4 bits; plain where the number of inputs is odd."""
    if weight_NK.shape[1] % 2:
        return weight_NK
    coarse, fine = (_rounded_to_int4(weight_NK, group, dtype) for group in GROUPS4)
    errors = [float((dequantize(weight) - weight_NK.float()).square().sum()) for weight in (coarse, fine)]
    chosen = fine if errors[1] < FINER_IF_BELOW * errors[0] else coarse
    return dataclasses.replace(chosen, bias=bias_N)


def _rounded_to_int4(weight_NK: torch.Tensor, group: int, dtype: torch.dtype) -> PackedWeight:
    groups = _grouped(weight_NK, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale_NG = _half((high - low) / 15)
    zero_NG = (-low / scale_NG).round()
    codes = (groups / scale_NG[..., None]).round() + zero_NG[..., None]
    return packed_weight(codes.clamp(0, 15).to(torch.uint8).flatten(1), scale_NG, zero_NG, 4, dtype)


def _half(scale_NG: torch.Tensor) -> torch.Tensor:
    """Scales rounded to what float16 holds, but for one power of two that all of them share: kernels keep them so. None is 0, so
    that zeros stay zeros."""
    power = torch.exp2(scale_NG.max().clamp(min=1e-30).log2().floor())
    return (scale_NG / power).clamp(min=2.0**-24).half().float() * power


def _grouped(weight_NK: torch.Tensor, group: int) -> torch.Tensor:
    """float32 [N, G, columns of a group]: of the wanted size, or of the next smaller power of two that divides the columns; all
    columns where none of 16 or more does."""
    inputs = weight_NK.shape[1]
    while group >= 16 and inputs % group:
        group //= 2
    return weight_NK.float().unflatten(1, (-1, group if group >= 16 else inputs))
