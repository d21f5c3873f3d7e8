"""Codes as checkpoints pack them, to codes as kernels take them: int32 words of 2 to 8 bits a code, tables of 4-bit floats.

Legend: N outputs, K inputs, G groups of columns.
"""

import dataclasses
import math
from typing import Literal

import torch

from quire.errors import ConfigError
from quire.kernels.packed import pack_nibbles
from quire.kernels.types import PackedWeight
from quire.layers.linear import WHOLE, Axis, Decoded

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Floats of 4 bits: sign, two bits of exponent, one of mantissa (OCP microscaling formats, version 1.0)."""


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 words along a dimension to the codes in them (uint8, without sign), the lowest bits first. Codes whose bits do not
    divide 32 go over the ends of words."""
    dim %= words.dim()
    words = words.movedim(dim, -1)
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
        codes = words.unsqueeze(-1) >> shifts & (1 << bits) - 1
    else:
        first = torch.arange(0, 32 * words.shape[-1] - bits + 1, bits, device=words.device)
        wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
        pairs = wide[..., first // 32] | wide[..., first // 32 + 1] << 32
        codes = (pairs >> first % 32 & (1 << bits) - 1).unsqueeze(-1)
    return codes.to(torch.uint8).flatten(-2).movedim(-1, dim)


def byte_parts(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 1, 2 or 4 bits in bytes (uint8), one a byte, the lowest first."""
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8)
    return (data[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def half_at(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A float16 in every block of bytes, as float32 [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def words_axis(of: Literal["rows", "columns"], bits: int) -> Axis:
    """The dimension of words along a matrix's rows or columns."""
    common = math.gcd(bits, 32)
    return Axis(of, 32 // common, bits // common, is_stream=True)


def weight_of_words(
    words_NW: torch.Tensor,
    inputs: int,
    scale_NG: torch.Tensor,
    zero_NG: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
    group: int,
    group_K: torch.Tensor | None = None,
) -> Decoded:
    """A weight whose codes are packed into int32 words along the inputs, the lowest bits first.

    Args:
        zero_NG: the code of 0, by group; None: the middle one.
        group: columns of a group; the last may have fewer.
        group_K: which group each column belongs to; None: adjacent columns are a group.

    Raises:
        ConfigError: groups of `group_K` are others than `group` says.
    """
    order = None if group_K is None else _order_of_groups(group_K.long(), scale_NG.shape[1], group)
    is_even = inputs % group == 0 or group >= inputs
    if order is None and is_even and bits in (4, 8) and words_NW.shape[1] * 32 == inputs * bits:
        # Words are bytes as we have them. (One word a row may have any stride, which a view in another type does not take.)
        data = words_NW.contiguous().as_strided(words_NW.shape, (words_NW.shape[1], 1)).view(torch.uint8)
        return _finished(data if bits == 4 else (data ^ 128).view(torch.int8), inputs, scale_NG, zero_NG, bits, dtype)
    codes_NK = unpack_words(words_NW, bits, 1)[:, :inputs]
    if order is None:
        return packed_weight(codes_NK, scale_NG, zero_NG, bits, dtype, group)
    if not is_even:  # ordered columns in groups of several sizes
        zero_NK = 1 << bits - 1 if zero_NG is None else zero_NG.float()[:, group_K]
        return ((codes_NK.float() - zero_NK) * scale_NG.float()[:, group_K]).to(dtype)
    weight = packed_weight(codes_NK[:, order], scale_NG, zero_NG, bits, dtype)
    return dataclasses.replace(weight, perm=order.int())


def packed_weight(
    codes_NK: torch.Tensor,
    scale_NG: torch.Tensor,
    zero_NG: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
    group: int = WHOLE,
) -> PackedWeight:
    """A weight of codes without sign (0 to 2**bits - 1), one a byte. Raises ConfigError as `weight_of_words`."""
    inputs = codes_NK.shape[1]
    if bits <= 4:  # of an odd number of columns in 8 bits
        data = codes_NK.to(torch.int8) if inputs % 2 else pack_nibbles(codes_NK)
    else:
        data = (codes_NK.short() - (1 << bits - 1)).to(torch.int8)
    zero_NG = None if zero_NG is None else even_groups(zero_NG, inputs, group)
    return _finished(data, inputs, even_groups(scale_NG, inputs, group), zero_NG, bits, dtype)


def _finished(
    data: torch.Tensor, inputs: int, scale_NG: torch.Tensor, zero_NG: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> PackedWeight:
    """Codes of more than 4 bits have got their sign here, zeros not yet."""
    check_groups(inputs, scale_NG.shape[1])
    middle = 1 << bits - 1
    zero = None if zero_NG is None else zero_NG.float()
    if bits > 4:
        zero = None if zero is None or bool((zero == middle).all()) else zero - middle
    elif zero is None:
        zero = torch.full_like(scale_NG, middle, dtype=torch.float32)
    return PackedWeight(
        data.shape[0],
        inputs,
        dtype,
        data.contiguous(),
        scale=scale_NG.float().contiguous(),
        zero=None if zero is None else zero.contiguous(),
    )


def even_groups(values_NG: torch.Tensor, inputs: int, group: int) -> torch.Tensor:
    """Numbers of groups the last of which may have fewer columns, as numbers of groups that all have as many."""
    if group >= inputs or inputs % group == 0:
        return values_NG
    size = math.gcd(group, inputs)
    return values_NG.repeat_interleave(group // size, 1)[:, : inputs // size].contiguous()


def affine_weight(
    codes_NK: torch.Tensor, scale_NG: torch.Tensor, offset_NG: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> PackedWeight:
    """A weight worth code * scale - offset, of codes without sign in 4 bits, or signed ones in 8."""
    zero_NG = None
    if offset_NG is not None:
        # Where the scale is 0, all values of the group are its offset: (0 - 1) * offset.
        is_flat = (scale_NG == 0) & (offset_NG != 0)
        if bool(is_flat.any()):
            codes_NK = codes_NK.masked_fill(is_flat.repeat_interleave(codes_NK.shape[1] // scale_NG.shape[1], 1), 0)
        zero_NG = torch.where(is_flat, 1.0, offset_NG / torch.where(scale_NG == 0, 1.0, scale_NG)).contiguous()
        scale_NG = torch.where(is_flat, offset_NG, scale_NG)
    data = pack_nibbles(codes_NK) if bits == 4 else codes_NK.to(torch.int8)
    outputs, inputs = codes_NK.shape
    return PackedWeight(outputs, inputs, dtype, data.contiguous(), scale=scale_NG.contiguous(), zero=zero_NG)


def check_groups(inputs: int, groups: int) -> None:
    """Raises ConfigError where columns do not fall into equal groups."""
    if inputs % groups:
        raise ConfigError(
            f"{inputs} columns with {groups} scales a row are no equal groups of columns, which is not supported",
            setting="quantization",
        )


def _order_of_groups(group_K: torch.Tensor, groups: int, group: int) -> torch.Tensor | None:
    """Columns in the order of their groups; None where they are in it already."""
    inputs = group_K.shape[0]
    if bool((group_K < 0).any()):  # not set: adjacent columns
        return None
    is_sorted = bool((group_K.diff() >= 0).all())
    if is_sorted:  # a rank's columns may begin with any group
        group_K = group_K - group_K[0]
    counts = torch.bincount(group_K, minlength=groups)
    is_ragged = group < inputs and inputs % group != 0 and -(-inputs // group) == groups
    if counts.shape[0] > groups or (not is_ragged and bool((counts * groups != inputs).any())):
        raise ConfigError(
            f"its {inputs} columns (g_idx) fall into groups of {int(counts.min())} to {int(counts.max())} columns, numbered to "
            f"{int(group_K.max())}, for {groups} scales: columns in the order of their activations cannot be split over ranks",
            setting="tensor_parallel_size",
        )
    return None if is_sorted else torch.argsort(group_K, stable=True)


def unpack_e2m1(packed_NB: torch.Tensor, scale_NG: torch.Tensor, dtype: torch.dtype) -> PackedWeight:
    """A weight of 4-bit floats, two a byte (the even column in the low half), times float32 scales."""
    return table_weight(packed_NB, scale_NG, E2M1, dtype)


def table_weight(
    packed_NB: torch.Tensor, scale_NG: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> PackedWeight:
    """A weight of places in a table of 16 values, two a byte (the even column in the low half), times scales."""
    outputs, half = packed_NB.shape
    check_groups(2 * half, scale_NG.shape[1])
    scale, table = scale_NG.float().contiguous(), table.float().to(packed_NB.device)
    return PackedWeight(outputs, 2 * half, dtype, packed_NB.contiguous(), scale=scale, table=table)


def e8m0_scale(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two by their biased exponent (uint8, or float8_e8m0fnu), as float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)
