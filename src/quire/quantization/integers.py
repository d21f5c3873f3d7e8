"""Integer codes with scales and zeros, as most formats store them: a format says what differs, the readers here do the rest.

Legend: N outputs, K inputs, G groups of columns.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from quire.kernels.types import Int8Weight
from quire.layers.linear import COLUMNS, ROWS, WHOLE, Axis, Decoded, Stored
from quire.quantization.codes import packed_weight, unpack_words, weight_of_words, words_axis
from quire.quantization.scheme import INT8_FORM, Form, Scheme, Tensors

INT32 = (torch.int32,)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
Rounding = Literal["no", "dynamic", "static"]
"""Whether activations are rounded to int8 too, and whether the checkpoint holds their scale."""


def shared_axes(rows: int, columns: int) -> tuple[Axis, ...]:
    """The dimensions of numbers that `rows` by `columns` values share."""
    return () if rows == WHOLE else (Axis("rows", rows), Axis("columns", columns))


def by_row(values: torch.Tensor, outputs: int, rows: int) -> torch.Tensor:
    """Numbers that `rows` rows share, as float32 [N, G]."""
    if rows == WHOLE:
        return values.float().reshape(1, 1).expand(outputs, 1)
    return values.float().reshape(-(-outputs // rows), -1).repeat_interleave(rows, 0)[:outputs]


def words(
    name: str,
    suffixes: tuple[str, str, str],
    bits: int,
    columns: int,
    *,
    rows: int = 1,
    along: Literal["rows", "columns"] = "columns",
    order: Sequence[int] | None = None,
    zeros: Literal["no", "words", "optional words", "numbers"] = "words",
    zero_offset: int = 0,
    group_index: str = "",
    is_ordered: bool = False,
    is_transposed: bool = False,
    fits_tiles: bool = True,
) -> Scheme:
    """Codes of 2 to 8 bits in int32 words, without sign.

    Args:
        suffixes: of codes, scales and zeros.
        columns, rows: that share a scale.
        along: the dimension along which codes are packed into words; zeros are packed along rows.
        order: the place of each code in its word; None: one after another.
        zeros: `numbers` are signed and one for each scale.
        zero_offset: what is added to stored zeros.
        group_index: the suffix of the group that each column belongs to, if the checkpoint may have it.
        is_ordered: columns of a group need not be adjacent.
        is_transposed: tensors have the inputs first.
        fits_tiles: as of `Form`.
    """
    codes_name, scale_name, zero_name = suffixes
    mask = (1 << bits) - 1

    def unpack_rows(words_WX: torch.Tensor, outputs: int) -> torch.Tensor:
        codes = unpack_words(words_WX, bits, 0)
        if order is not None:
            codes = codes.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)
        return codes[:outputs]

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        outputs, inputs = shape
        given = {suffix: tensors[suffix] for suffix in suffixes if suffix in tensors}
        if is_transposed:
            given = {suffix: tensor.T for suffix, tensor in given.items()}
        scale_NG, zero = by_row(given[scale_name], outputs, rows), given.get(zero_name)
        zero_NG = None
        if zero is not None and zeros == "numbers":
            zero_NG = by_row(zero, outputs, rows) + (1 << bits - 1)
        elif zero is not None:
            zero_NG = unpack_rows(zero, outputs).int() + zero_offset & mask
        if along == "rows":
            return packed_weight(unpack_rows(given[codes_name], outputs), scale_NG, zero_NG, bits, dtype, columns)
        group_K = tensors.get(group_index)
        return weight_of_words(given[codes_name], inputs, scale_NG, zero_NG, bits, dtype, columns, group_K)

    def stored(axes: tuple[Axis, ...], dtypes: tuple[torch.dtype, ...] | None, optional: bool = False) -> Stored:
        return Stored(axes[::-1] if is_transposed else axes, dtypes, optional)

    row_words = words_axis("rows", bits)
    tensors = {
        codes_name: stored((row_words, COLUMNS) if along == "rows" else (ROWS, words_axis("columns", bits)), INT32),
        scale_name: stored(shared_axes(rows, columns), None),
    }
    if zeros == "numbers":
        tensors[zero_name] = stored(shared_axes(rows, columns), INTEGERS)
    elif zeros != "no":
        tensors[zero_name] = stored((row_words, Axis("columns", columns)), INT32, zeros == "optional words")
    if group_index:
        cuts = ("rows",) if is_ordered else ("rows", "columns")
        tensors[group_index] = Stored((COLUMNS,), INT32, optional=True, cuts=cuts)
    form = Form("packed", 4 if bits <= 4 else 8, columns, bits <= 4 or zeros != "no", fits_tiles)
    return Scheme(name, tensors, decode, form)


def int8(
    name: str,
    suffixes: tuple[str, str, str] = ("weight", "weight_scale", "weight_zero_point"),
    *,
    rows: int = 1,
    columns: int = WHOLE,
    rounding: Rounding = "no",
    is_symmetric: bool = True,
    is_signed: bool = True,
    is_transposed: bool = False,
) -> Scheme:
    """Codes in a byte each. Activations are rounded only where all zeros are 0.

    Args:
        suffixes: of codes, scales and zeros.
        columns, rows: that share a scale.
        is_symmetric: the checkpoint may lack zeros.
        is_transposed: tensors have the inputs first.
    """
    codes_name, scale_name, zero_name = suffixes

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        codes, scale, zero = tensors[codes_name], tensors[scale_name], tensors.get(zero_name)
        if is_transposed:
            codes, scale, zero = codes.T, scale.T, None if zero is None else zero.T
        scale_NG = by_row(scale, shape[0], rows)
        zero_NG = None if zero is None or not bool(zero.any()) else by_row(zero, shape[0], rows)
        if rounding != "no" and zero_NG is None:
            input_scale = tensors["input_scale"].float().reshape(-1).max().reshape(1) if rounding == "static" else None
            scale_N = scale_NG.reshape(-1).contiguous()
            return Int8Weight(*shape, dtype, codes.contiguous(), scale=scale_N, input_scale=input_scale)
        if is_signed:
            codes = codes.contiguous().view(torch.uint8) ^ 128
            zero_NG = None if zero_NG is None else zero_NG + 128
        elif zero_NG is None:
            zero_NG = torch.zeros_like(scale_NG)
        return packed_weight(codes, scale_NG, zero_NG, 8, dtype, columns)

    def stored(axes: tuple[Axis, ...], dtypes: tuple[torch.dtype, ...] | None, optional: bool = False) -> Stored:
        return Stored(axes[::-1] if is_transposed else axes, dtypes, optional)

    is_static = rounding == "static"
    scale_axes = shared_axes(rows, columns)[: 1 if columns == WHOLE else 2]  # [N] or [N, 1] where rows have one scale
    tensors = {
        codes_name: stored((ROWS, COLUMNS), (torch.int8 if is_signed else torch.uint8,)),
        scale_name: stored(scale_axes, None),
        zero_name: stored(scale_axes, INTEGERS, optional=is_symmetric),
        "input_scale": Stored(() if is_static else None, optional=not is_static),
        "input_zero_point": Stored(None, INTEGERS, optional=True),
    }
    form = Form("packed", 8, columns, not is_symmetric, fits_tiles=is_symmetric)
    return Scheme(name, tensors, decode, INT8_FORM if rounding != "no" else form)
