"""Parts of one matrix, decoded each by itself, put under one another: q, k and v; gate and up.

Packed parts may differ in bits and groups: the joined weight has the wider codes and the finer groups, with the same values.
What cannot be joined so becomes plain.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch

from quire.kernels import ops, packed
from quire.kernels.packed import code_bits, unpack_nibbles
from quire.kernels.types import Fp8Weight, Int8Weight, LinearWeight, PackedWeight
from quire.layers.linear import Decoded


def dense(part: Decoded, dtype: torch.dtype) -> torch.Tensor:
    """A part's values as a plain matrix [N, K]."""
    if isinstance(part, torch.Tensor):
        return part.to(dtype)
    if isinstance(part, PackedWeight):
        return packed.dequantize(part).to(dtype)
    if type(part) is LinearWeight and part.data is not None:
        return part.data.to(dtype)
    if isinstance(part, Fp8Weight | Int8Weight):
        assert part.data is not None
        return (part.data.float() * part.scale[:, None]).to(dtype)
    raise TypeError(f"a part of a matrix is {type(part).__name__}")


def cut(part: Decoded, rows: slice, columns: slice) -> Decoded:
    """Rows and columns of a matrix: of packed codes in finer groups where that is needed, and plain where their order or too
    small a group forbids it."""
    if isinstance(part, torch.Tensor):
        return part[rows, columns].contiguous()
    is_all = columns == slice(0, part.in_features)
    if not isinstance(part, PackedWeight):
        assert isinstance(part, Fp8Weight | Int8Weight) and part.data is not None
        data = part.data[rows, columns].contiguous()
        return dataclasses.replace(part, **_sizes(data), data=data, scale=part.scale[rows].contiguous())
    codes, scale_NG = part.plain()
    groups, first, last = scale_NG.shape[1], columns.start, columns.stop
    size = last - first if groups == 1 else math.gcd(part.in_features // groups, first, last)
    if not is_all and (part.perm is not None or (groups > 1 and size % 8) or first % 2 or last % 2):
        return dense(part, part.dtype)[rows, columns].contiguous()

    def numbers(values_NG: torch.Tensor | None) -> torch.Tensor | None:
        if values_NG is None or is_all or groups == 1:
            return None if values_NG is None else values_NG[rows].contiguous()
        fine_NG = values_NG[rows].repeat_interleave(part.in_features // groups // size, 1)
        return fine_NG[:, first // size : last // size].contiguous()

    a_byte = 2 if code_bits(codes) == 4 else 1
    data = codes[rows, first // a_byte : last // a_byte].contiguous()
    sizes = _sizes(data) | {"in_features": last - first}
    return dataclasses.replace(part, **sizes, data=data, scale=numbers(scale_NG), zero=numbers(part.zero))


def _sizes(data: torch.Tensor) -> dict[str, int]:
    return {"out_features": data.shape[0], "in_features": data.shape[1]}


def join(parts: Sequence[Decoded], bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
    """One weight of the parts; plain (a `LinearWeight` itself), and packed already, where they do not fit together."""
    bias = None if bias_N is None else bias_N.float()
    joined = _joined(parts)
    if joined is None:
        return ops.pack_linear(torch.cat([dense(part, dtype) for part in parts]), bias)
    joined.bias = bias
    return joined


def ready(weight: LinearWeight) -> LinearWeight:
    """The weight in the layout that its products take."""
    if isinstance(weight, PackedWeight):
        return packed.pack_codes(weight)
    return packed.pack_int8(weight) if isinstance(weight, Int8Weight) else weight


def codes(parts: Sequence[Decoded]) -> PackedWeight | None:
    """The parts as one weight of codes for products with inputs as they are, be it that they were made for rounded ones; None
    where they are no codes or do not fit together."""
    packs: list[Decoded] = []
    for part in parts:
        if isinstance(part, Fp8Weight | Int8Weight):
            shape = part.out_features, part.in_features
            part = PackedWeight(*shape, part.dtype, part.data, scale=part.scale[:, None])
        packs.append(part)
    joined = _joined(packs)
    return joined if isinstance(joined, PackedWeight) else None


def _joined(parts: Sequence[Decoded]) -> LinearWeight | None:
    packs = [part for part in parts if isinstance(part, PackedWeight)]
    if len(packs) == len(parts):
        return _join_packed(packs)
    for kind in (Fp8Weight, Int8Weight):
        same = [part for part in parts if isinstance(part, kind)]
        if len(same) == len(parts):
            return _join_rounding(same)
    return None


def _join_rounding(parts: Sequence[Fp8Weight | Int8Weight]) -> LinearWeight | None:
    """Weights whose inputs are rounded too."""
    first, *others = parts
    if not others:
        return first
    given = [part.input_scale for part in parts if part.input_scale is not None]
    if given and len(given) < len(parts):
        return None
    return dataclasses.replace(
        first,
        out_features=sum(part.out_features for part in parts),
        data=torch.cat([part.data for part in parts if part.data is not None]),
        scale=torch.cat([part.scale for part in parts]),
        # Parts of one matrix share their input: what the largest of their scales holds, all of them hold.
        input_scale=torch.cat(given).max().reshape(1) if given else None,
    )


def _join_packed(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    first, *others = parts
    if not others:
        return first
    if not all(_same(part.perm, first.perm) for part in others):
        return None
    if not all(_same(part.table, first.table) for part in others):
        wide = [_without_table(part) for part in parts]
        return None if None in wide else _join_packed([part for part in wide if part is not None])
    if len({part.plain()[0].is_floating_point() for part in parts}) > 1:
        return None
    bits = max(code_bits(part.plain()[0]) for part in parts)
    groups = math.lcm(*(part.plain()[1].shape[1] for part in parts))
    if first.in_features % groups:
        return None
    alike = [_converted(part, bits, groups) for part in parts]
    has_zeros = any(part.zero is not None for part in alike)
    zeros = [torch.zeros_like(part.plain()[1]) if part.zero is None else part.zero for part in alike]
    return dataclasses.replace(
        first,
        out_features=sum(part.out_features for part in parts),
        data=torch.cat([part.plain()[0] for part in alike]),
        scale=torch.cat([part.plain()[1] for part in alike]),
        zero=torch.cat(zeros) if has_zeros else None,
    )


def _converted(part: PackedWeight, bits: int, groups: int) -> PackedWeight:
    """The same values with wider codes and finer groups."""
    codes, scale_NG = part.plain()
    if bits > code_bits(codes):
        codes = unpack_nibbles(codes).to(torch.int8)
    repeats = groups // scale_NG.shape[1]
    if repeats == 1:
        return dataclasses.replace(part, data=codes)
    zero = None if part.zero is None else part.zero.repeat_interleave(repeats, 1)
    return dataclasses.replace(part, data=codes, scale=scale_NG.repeat_interleave(repeats, 1), zero=zero)


def _without_table(part: PackedWeight) -> PackedWeight | None:
    """The same values in codes of 8 bits; None where those of the table are no whole numbers of -127 to 127, nor halves."""
    if part.table is None:
        return part
    codes, scale_NG = part.plain()
    unit = next((unit for unit in (1.0, 0.5) if bool((part.table % unit == 0).all())), None)
    if unit is None or float(part.table.abs().max()) > 127 * unit:
        return None
    data = (part.table / unit).to(torch.int8)[unpack_nibbles(codes).long()]
    zero = None if part.zero is None else part.zero / unit
    return dataclasses.replace(part, data=data, scale=scale_NG * unit, zero=zero, table=None)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
