"""Codes in tiles: how a weight's small codes are laid out for the tensor cores, and how they become numbers in registers.

Rows come in blocks of 128, columns in tiles; a tile's codes lie together, row by row. A word of 16 bits holds PARTS codes of a
row: word i of a tile has columns i, i + WORDS, i + 2 * WORDS … of it, so that taking part p of every word gives WORDS adjacent
columns. A number is made two at a time: a code is put into the bits of a bfloat16 or float16 of known exponent, and what that
adds is subtracted (or multiplied away) again, without rounding. Numbers of a table are picked byte by byte, four codes at a
time: a word of 16 bits is the selector of a permutation of eight bytes.

Legend: N outputs, K inputs, W words of a tile's row.
"""

import dataclasses

import torch
import triton

from quire.kernels.packed import code_bits, unpack_nibbles
from quire.kernels.triton.launch import cdiv, compute_capability, tl
from quire.kernels.types import PackedWeight

BLOCK_ROWS = 128
WHOLE_4, FLOAT_4, WHOLE_8, FLOAT_8, TABLE_4 = range(5)
"""Kinds of codes: 0 to 15 less a zero; e2m1; -128 to 127; e4m3; places in a table, which is a number itself: kinds from `TABLE_4`
on are `TABLE_4` plus 8 times its 16 entries' bits, the first in the lowest."""
_FLOAT_4, _WHOLE_4, _WHOLE_8 = tl.constexpr(FLOAT_4), tl.constexpr(WHOLE_4), tl.constexpr(WHOLE_8)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A weight's layout.

    Attributes:
        kind: what its codes are.
        columns: columns of a tile.
        group: columns that share a scale.
        share: scales that stand in one word.
    """

    kind: int
    columns: int
    group: int
    share: int = 1

    @property
    def most_shared(self) -> int:
        """Scales that could stand in one word: a tile's own, or one where there is a zero beside each."""
        return 1 if self.kind == WHOLE_4 else max(self.columns // self.group, 1)


def _kind_of(weight: PackedWeight) -> int | None:
    codes, _ = weight.plain()
    if code_bits(codes) == 8:
        return None if weight.zero is not None else FLOAT_8 if codes.is_floating_point() else WHOLE_8
    if weight.table is None:
        return WHOLE_4
    e2m1 = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=weight.table.device)
    if weight.zero is not None or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    if torch.equal(weight.table.float(), e2m1):
        return FLOAT_4
    entries = weight.table.to(weight.dtype).view(torch.int16).tolist()
    return TABLE_4 + 8 * sum((entry & 0xFFFF) << 16 * place for place, entry in enumerate(entries))


def layout_of(weight: PackedWeight, *, may_pad: bool = False) -> Tiles | None:
    """None where codes, groups or zeros are others than the tensor cores' kernel takes.

    Args:
        may_pad: columns of zeros may follow the last one, up to whole tiles (`with_whole_tiles`).
    """
    kind = _kind_of(weight)
    if kind is None or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    if kind == WHOLE_4 and weight.zero is not None and not torch.equal(_zeros_of(weight)[1], weight.zero.float()):
        return None
    groups, parts = weight.plain()[1].shape[1], 16 // code_bits(weight.plain()[0])
    for columns in (32 * parts, 16 * parts):
        words, inputs = columns // parts, weight.in_features
        if may_pad:
            inputs = cdiv(inputs, columns) * columns
        group = inputs if groups == 1 else weight.in_features // groups
        is_even = inputs % columns == 0 and inputs % group == 0 and group % words == 0
        if is_even and (columns % group == 0 or group % columns == 0):
            return Tiles(kind, columns, group)
    return None


def offset_of(dtype: torch.dtype) -> float:
    """The number of a type that a whole code is added to in its last bits."""
    return 128.0 if dtype == torch.bfloat16 else 1024.0


def _zeros_of(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(zeros as the model's type holds them, with the offset; what they are worth)."""
    scale_NG, offset = weight.plain()[1], offset_of(weight.dtype)
    zero_NG = ((torch.zeros_like(scale_NG) if weight.zero is None else weight.zero) + offset).to(weight.dtype)
    return zero_NG, zero_NG.float() - offset


def scale_sizes(weight: PackedWeight, layout: Tiles) -> set[int]:
    """The bits in which scales can stand without rounding: 8 (the exponent of a power of two, where a word has at least four),
    16 (float16) and 32 (float32)."""
    scale_NG = weight.plain()[1].float().contiguous()
    exponents = scale_NG.view(torch.int32) >> 23
    is_power = layout.most_shared % 4 == 0 and torch.equal((exponents & 255) << 23, scale_NG.view(torch.int32))
    is_half = torch.equal(scale_NG.half().float(), scale_NG)
    return {32, *((8,) if is_power else ()), *((16,) if is_half else ())}


def with_whole_tiles(weight: PackedWeight, layout: Tiles) -> PackedWeight:
    """The weight, with columns of zeros behind the last where the layout asks for them."""
    codes, scale_NG = weight.plain()
    more = -weight.in_features % layout.columns
    groups = more // layout.group  # none where one group is as wide as the matrix
    padded = torch.nn.functional.pad
    return dataclasses.replace(
        weight,
        in_features=weight.in_features + more,
        data=padded(codes.view(torch.uint8), (0, more * code_bits(codes) // 8)).view(codes.dtype),
        scale=padded(scale_NG, (0, groups)),
        zero=None if weight.zero is None else padded(weight.zero, (0, groups)),
    )


def tiled(weight: PackedWeight, layout: Tiles, scale_size: int) -> PackedWeight:
    """The weight in tiles of a layout that fits (`layout_of`), with scales in so many bits (`scale_sizes`).

    `packed` is int16 [N / 128 rounded up, K / columns, 128, W]. `scale` is [groups / share, rounded N] words. Kinds with zeros
    have one scale a word: int32 with float16 and, above it, the zero; int64 with float32. A zero is in the model's type and
    includes what code 0 becomes (`offset_of`). Of other kinds adjacent groups of a tile share a word, the first one in the lowest
    bits."""
    codes, scale_NG = weight.plain()
    scale = _scale_words(weight, layout, scale_size)
    n, k = weight.out_features, weight.in_features
    rows = cdiv(n, BLOCK_ROWS) * BLOCK_ROWS
    bits = code_bits(codes)
    plain = unpack_nibbles(codes) if bits == 4 else codes.view(torch.uint8)
    plain = torch.nn.functional.pad(plain, (0, 0, 0, rows - n))
    parts = plain.view(rows // BLOCK_ROWS, BLOCK_ROWS, k // layout.columns, 16 // bits, -1).permute(3, 0, 2, 1, 4)
    words = parts[0].to(torch.int32)
    for part in range(1, 16 // bits):
        words |= parts[part].to(torch.int32) << bits * part
    return dataclasses.replace(
        weight,
        data=None,
        packed=words.to(torch.int16).contiguous(),
        scale=torch.nn.functional.pad(scale, (0, 0, 0, rows - n)).t().contiguous(),
        zero=None,
        table=None,
        layout=dataclasses.replace(layout, share=scale_NG.shape[1] // scale.shape[1]),
    )


def _scale_words(weight: PackedWeight, layout: Tiles, size: int) -> torch.Tensor:
    """int32 or int64 [N, groups / share]."""
    scale_NG = weight.plain()[1].float().contiguous()
    bits = {
        8: lambda: (scale_NG.view(torch.int32) >> 23).to(torch.uint8),
        16: lambda: scale_NG.half().view(torch.int16),
        32: lambda: scale_NG.view(torch.int32),
    }[size]()
    share = next(share for share in (4, 2, 1) if layout.most_shared % share == 0 and (share == 1 or share * size <= 64))
    if share > 1:
        return bits.view(torch.int32 if share * size == 32 else torch.int64)
    word = torch.int32 if size == 16 else torch.int64
    alone = bits.to(word) & (1 << size) - 1
    if layout.kind != WHOLE_4:
        return alone
    return alone | _zeros_of(weight)[0].view(torch.int16).to(word) << size


@triton.constexpr_function
def _assembly(kind, part, is_half):
    """Two numbers [$0] of two words [$1], less two zeros [$2] where the kind has them."""
    bits = 4 if kind in (WHOLE_4, FLOAT_4) else 8
    lines = ["mov.b32 a, $1;" if part == 0 else f"shr.u32 a, $1, {bits * part};"]
    number = "f16x2" if is_half else "bf16x2"
    one = "0x64006400" if is_half else "0x43004300"  # 1024 or 128, whose last bit is worth 1
    if kind == WHOLE_4:
        lines += [f"lop3.b32 a, a, 0x000f000f, {one}, 0xea;", f"sub.{number} $0, a, $2;"]
    elif kind == WHOLE_8:
        lines += [f"lop3.b32 b, a, 0x00800080, {one}, 0xea;", f"lop3.b32 a, a, 0x007f007f, {one}, 0xea;"]
        lines += [f"sub.{number} $0, a, b;"]
    else:
        shift, places, power = {
            (FLOAT_4, False): (6, "0x01c001c0", "0x7e807e80"),
            (FLOAT_4, True): (9, "0x0e000e00", "0x74007400"),
            (FLOAT_8, False): (4, "0x07f007f0", "0x7b807b80"),
            (FLOAT_8, True): (7, "0x3f803f80", "0x5c005c00"),
        }[kind, is_half]
        lines += [f"shl.b32 b, a, {16 - bits};", "and.b32 b, b, 0x80008000;", f"shl.b32 a, a, {shift};"]
        lines += [f"lop3.b32 a, a, {places}, b, 0xea;", f"mov.b32 b, {power};", f"mul.{number} $0, a, b;"]
    return "{ .reg .b32 a, b; " + " ".join(lines) + " }"


@triton.constexpr_function
def _is_table(kind):
    return kind >= TABLE_4


@triton.constexpr_function
def _entry(kind, code):
    """The bits of a table's entry, as int16 has them."""
    bits = kind >> 3 + 16 * code & 0xFFFF
    return bits - 0x10000 * (bits >> 15)


@triton.constexpr_function
def _table_assembly(kind):
    """The numbers [$0 … $3] of the four codes of each of two words [$4], two of a part in each."""
    eighths = [[(kind >> 3 + 16 * code + shift) & 0xFF for code in range(16)] for shift in (0, 8)]
    lines = ["shr.u32 b, $4, 16;"]
    for word, source in (("a", "$4"), ("b", "b")):
        # A code's lower bits pick from each half of the table, its highest one from these two.
        lines += [f"and.b32 inner, {source}, 0x7777;", f"shr.u32 half, {source}, 1;"]
        lines += ["lop3.b32 half, half, 0x4444, 0x3210, 0xea;"]
        for name, entries in zip("lh", eighths, strict=True):
            quads = [sum(byte << 8 * at for at, byte in enumerate(entries[i : i + 4])) for i in (0, 4, 8, 12)]
            lines += [f"mov.b32 p, {quads[0]:#x};", f"prmt.b32 p, p, {quads[1]:#x}, inner;"]
            lines += [f"mov.b32 q, {quads[2]:#x};", f"prmt.b32 q, q, {quads[3]:#x}, inner;"]
            lines += [f"prmt.b32 {name}{word}, p, q, half;"]
    for part, bytes_of_two in ((0, "0x5140"), (2, "0x7362")):
        lines += [f"prmt.b32 p, la, ha, {bytes_of_two};", f"prmt.b32 q, lb, hb, {bytes_of_two};"]
        lines += [f"prmt.b32 ${part}, p, q, 0x5410;", f"prmt.b32 ${part + 1}, p, q, 0x7632;"]
    return "{ .reg .b32 b, inner, half, p, q, la, ha, lb, hb; " + " ".join(lines) + " }"


@triton.jit
def scale_of(both_N, NUMBER: tl.constexpr, SHARE: tl.constexpr):
    """Scales in float32, of what `tiled` made of scales and zeros: number NUMBER of the SHARE of each word."""
    BITS: tl.constexpr = both_N.dtype.primitive_bitwidth // SHARE
    bits = both_N >> (NUMBER * BITS)
    if BITS == 8:
        scale = ((bits & 255).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif BITS == 16 or (BITS == 32 and SHARE == 1):
        scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def zero_bits(both_N):
    """The bits of zeros, of what `tiled` made of scales and zeros."""
    if both_N.dtype == tl.int32:
        bits = (both_N >> 16).to(tl.int16)
    else:
        bits = (both_N >> 32).to(tl.int16)
    return bits


@triton.jit
def decode(words_NW, both_N, KIND: tl.constexpr, PART: tl.constexpr, IS_HALF: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Part PART of every word as numbers of the model's type, exact, less the zeros that come with the scales `both_N`. There may
    be more dimensions before N."""
    dtype: tl.constexpr = tl.float16 if IS_HALF else tl.bfloat16
    if _is_table(KIND):
        if ASSEMBLY:
            bits = tl.inline_asm_elementwise(
                _table_assembly(KIND),
                "=r,=r,=r,=r,r",
                [words_NW],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=True,
                pack=2,
            )[PART]
        else:
            code = (words_NW >> (4 * PART)) & 15
            bits = tl.zeros_like(words_NW)
            for entry in tl.static_range(16):
                bits = tl.where(code == entry, _entry(KIND, entry), bits).to(tl.int16)
        return bits.to(dtype, bitcast=True)
    elif ASSEMBLY and KIND == _WHOLE_4:
        zero = tl.broadcast_to(tl.expand_dims(zero_bits(both_N), -1), words_NW.shape)
        bits = tl.inline_asm_elementwise(
            _assembly(KIND, PART, IS_HALF), "=r,r,r", [words_NW, zero], dtype=tl.int16, is_pure=True, pack=2
        )
        return bits.to(dtype, bitcast=True)
    elif ASSEMBLY:
        bits = tl.inline_asm_elementwise(
            _assembly(KIND, PART, IS_HALF), "=r,r", [words_NW], dtype=tl.int16, is_pure=True, pack=2
        )
        return bits.to(dtype, bitcast=True)
    elif KIND == _WHOLE_4:
        offset: tl.constexpr = 1024.0 if IS_HALF else 128.0
        code = ((words_NW >> (4 * PART)) & 15).to(tl.float32)
        zero = zero_bits(both_N).to(dtype, bitcast=True).to(tl.float32)
        return (code + offset - tl.expand_dims(zero, -1)).to(dtype)
    elif KIND == _FLOAT_4:
        code = (words_NW >> (4 * PART)) & 15
        exponent = (code >> 1) & 3
        size = (
            tl.where(exponent == 0, 0.5, (1 << exponent).to(tl.float32) * 0.5)
            * (code & 1)
            * tl.where(exponent == 0, 1.0, 0.5)
        )
        size += tl.where(exponent == 0, 0.0, (1 << exponent).to(tl.float32) * 0.5)
        return tl.where((code & 8) == 8, -size, size).to(dtype)
    else:
        code = ((words_NW >> (8 * PART)) & 255).to(tl.uint8)
        if KIND == _WHOLE_8:
            return code.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)


def may_assemble() -> bool:
    """Whether two numbers can be made at a time: in NVIDIA's assembly, from compute capability 9.0."""
    return compute_capability()[0] >= 9
