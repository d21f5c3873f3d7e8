"""Codes as checkpoints pack them, to codes as kernels take them: int32 words of 2, 4 or 8 bits a code, tables of 4-bit floats.

Legend: N outputs, K inputs, G groups of columns.
"""

import dataclasses

import torch

from quire.errors import ConfigError
from quire.kernels.packed import PackedWeight, pack_nibbles

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Floats of 4 bits: sign, two bits of exponent, one of mantissa (OCP microscaling formats, version 1.0)."""


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 words along a dimension to the codes in them (uint8, without sign), the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8)
    dim %= words.dim()
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def weight_of_words(
    words_NW: torch.Tensor,
    inputs: int,
    scale_NG: torch.Tensor,
    zero_NG: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
    group_K: torch.Tensor | None = None,
) -> PackedWeight:
    """A weight whose codes stand in int32 words along the inputs, the lowest bits first.

    Args:
        zero_NG: the code of 0, by group; None: the middle one.
        group_K: which group each column belongs to; None: adjacent columns are a group.

    Raises:
        ConfigError: columns do not fall into equal groups.
    """
    perm_K = None if group_K is None else _order_of_groups(group_K.long(), scale_NG.shape[1])
    if perm_K is None and bits in (4, 8) and words_NW.shape[1] * 32 == inputs * bits:  # words are bytes as we have them
        data = words_NW.contiguous().view(torch.uint8)
        return _finished(data if bits == 4 else (data ^ 128).view(torch.int8), inputs, scale_NG, zero_NG, bits, dtype)
    codes_NK = unpack_words(words_NW, bits, 1)[:, :inputs]
    if perm_K is None:
        return packed_weight(codes_NK, scale_NG, zero_NG, bits, dtype)
    weight = packed_weight(codes_NK[:, perm_K], scale_NG, zero_NG, bits, dtype)
    return dataclasses.replace(weight, perm=perm_K.int())


def packed_weight(
    codes_NK: torch.Tensor, scale_NG: torch.Tensor, zero_NG: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> PackedWeight:
    """A weight of codes without sign (0 to 2**bits - 1), one a byte. Raises ConfigError as `weight_of_words`."""
    data = pack_nibbles(codes_NK) if bits < 8 else (codes_NK.to(torch.uint8) ^ 128).view(torch.int8)
    return _finished(data, codes_NK.shape[1], scale_NG, zero_NG, bits, dtype)


def _finished(
    data: torch.Tensor, inputs: int, scale_NG: torch.Tensor, zero_NG: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> PackedWeight:
    """Codes of 8 bits have got their sign here, zeros not yet."""
    check_groups(inputs, scale_NG.shape[1])
    middle = 1 << bits - 1
    zero = None if zero_NG is None else zero_NG.float()
    if bits == 8:
        zero = None if zero is None or bool((zero == middle).all()) else zero - middle
    elif zero is None:
        zero = torch.full_like(scale_NG, middle, dtype=torch.float32)
    return PackedWeight(
        data.shape[0], inputs, dtype, data.contiguous(), scale=scale_NG.float().contiguous(),
        zero=None if zero is None else zero.contiguous(),
    )  # fmt: skip


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
    """Raises ConfigError where columns do not fall into equal groups of an even number."""
    if inputs % groups or inputs % 2:
        raise ConfigError(
            f"{inputs} columns with {groups} scales a row are no equal groups of columns, which is not supported",
            setting="quantization",
        )


def _order_of_groups(group_K: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Columns in the order of their groups; None where they are in it already."""
    inputs = group_K.shape[0]
    if bool((group_K < 0).any()):  # not set: adjacent columns
        return None
    is_sorted = bool((group_K.diff() >= 0).all())
    if is_sorted:  # a rank's columns may begin with any group
        group_K = group_K - group_K[0]
    counts = torch.bincount(group_K, minlength=groups)
    if counts.shape[0] > groups or bool((counts * groups != inputs).any()):
        raise ConfigError(
            f"its {inputs} columns (g_idx) fall into groups of {int(counts.min())} to {int(counts.max())} columns, numbered to "
            f"{int(group_K.max())}, for {groups} scales: columns in the order of their activations cannot be split over ranks",
            setting="tensor_parallel_size",
        )
    return None if is_sorted else torch.argsort(group_K, stable=True)


def unpack_e2m1(packed_NB: torch.Tensor, scale_NG: torch.Tensor, dtype: torch.dtype) -> PackedWeight:
    """A weight of 4-bit floats, two a byte (the even column in the low half), times float32 scales."""
    outputs, half = packed_NB.shape
    check_groups(2 * half, scale_NG.shape[1])
    table = E2M1.to(packed_NB.device)
    scale = scale_NG.float().contiguous()
    return PackedWeight(outputs, 2 * half, dtype, packed_NB.contiguous(), scale=scale, table=table)


def e8m0_scale(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two by their biased exponent (uint8, or float8_e8m0fnu), as float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)
