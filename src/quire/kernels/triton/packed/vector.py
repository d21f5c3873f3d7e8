"""Whole codes in tiles times one short row, by sums of four products of bytes.

A program owns a few rows of the weight and all of their columns, so that none waits for another, and all of their codes are on
their way into registers before the inputs are there. A thread has eight columns in each of a tile's four parts, of several rows.
Their inputs become whole numbers of 16 bits once for all rows: times the power of two that brings the largest of the 32 below
2^15, which is exact for those within 2^7 of it and rounds the others to 2^-16 of it. Their high bytes and low bytes are
multiplied by four codes at a time; sums are exact until a group's scale and zero are applied.

Legend: N outputs, K inputs, S eight tiles side by side, W words of 32 bits in a tile's row, Q quarters of these, one of a thread,
R groups of eight rows.
"""

# ruff: noqa: RUF005 (the compiler knows sums of tuples, not unpacking)

import dataclasses
from typing import cast

import torch
import triton

from quire.kernels.triton.launch import await_previous, cdiv, interpreted, launch_options, tl
from quire.kernels.triton.norm.activations import KINDS, activate
from quire.kernels.triton.packed.layout import BLOCK_ROWS, WHOLE_4, Tiles, may_assemble, scale_of, zero_bits
from quire.kernels.types import PackedWeight

COLUMNS = 128
MAX_COLUMNS = 4096
"""Of a row, whose codes are all in registers."""


@dataclasses.dataclass(frozen=True)
class VectorConfig:
    """Blocks of `vector_kernel`; those that are set were the fastest for all of Llama-3.1-8B's short rows (H200).

    Attributes:
        eights: groups of eight rows of a program, 2 or 4; half of them are gate's and half up's in a gated pair.
        warps: of a program.
    """

    eights: int = 2
    warps: int = 4


@triton.jit
def _codes(
    w_ptr, scale_ptr, first, N, ROWS, LAST: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, R: tl.constexpr
):
    """Words [S, 8, W] and scales with zeros [S, 8] of all rows and tiles: one after the other of eight rows and tiles, and of
    eight rows, tiles and group."""
    side, eight, word = tl.arange(0, 8), tl.arange(0, 8), tl.arange(0, 16)
    GROUPS: tl.constexpr = 2 if GROUP == 64 else 1
    codes, scales = (), ()
    for r in tl.static_range(R):
        row = first + r % OWN * 8 + r // OWN * N
        rows = w_ptr + (row // 128).to(tl.int64) * (LAST * 128 * 16) + row % 128 * 16
        for u in tl.static_range(LAST // 8):
            tile = u * 8 + side
            place = tile[:, None, None] * (128 * 16) + eight[None, :, None] * 16 + word[None, None, :]
            codes = codes + (tl.load(rows + place, eviction_policy="evict_first"),)
            for group in tl.static_range(GROUPS):
                at = tile * 2 + group if GROUP == 64 else tile // (GROUP // 128)
                both = tl.load(scale_ptr + at[:, None] * ROWS + row + eight[None, :], eviction_policy="evict_first")
                scales = scales + (both,)
    return codes, scales


@triton.jit
def _largest(first, second, third, fourth, ASSEMBLY: tl.constexpr):
    """The bits of the largest size among pairs of bfloat16 numbers."""
    if ASSEMBLY:
        sizes = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            and.b32 a, $1, 0x7fff7fff; and.b32 b, $2, 0x7fff7fff; max.u16x2 a, a, b;
            and.b32 b, $3, 0x7fff7fff; max.u16x2 a, a, b; and.b32 b, $4, 0x7fff7fff; max.u16x2 a, a, b;
            shr.u32 b, a, 16; max.u16x2 $0, a, b; }""",
            "=r,r,r,r,r",
            [first, second, third, fourth],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        sizes &= 0xFFFF
    else:
        sizes = tl.zeros_like(first)
        for pair in (first, second, third, fourth):
            sizes = tl.maximum(sizes, tl.maximum(pair & 0x7FFF, (pair >> 16) & 0x7FFF))
    return sizes


@triton.jit
def _whole(value, power, SHIFT: tl.constexpr, BYTE: tl.constexpr):
    """Byte BYTE of a bfloat16 number times a power of two, made whole, as part SHIFT of a word."""
    return ((value * power + 12582912.0).to(tl.int32, bitcast=True) >> (8 * BYTE) & 255) << (8 * SHIFT)


@triton.jit
def _bytes(first, second, power, ASSEMBLY: tl.constexpr):
    """The low and the high bytes of four numbers: the first pair's lower, the second's lower, the first's upper, the second's."""
    if ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d;
            shl.b32 a, $2, 16; shl.b32 b, $3, 16; and.b32 c, $2, 0xffff0000; and.b32 d, $3, 0xffff0000;
            fma.rn.f32 a, a, $4, 0f4B400000; fma.rn.f32 b, b, $4, 0f4B400000;
            fma.rn.f32 c, c, $4, 0f4B400000; fma.rn.f32 d, d, $4, 0f4B400000;
            prmt.b32 a, a, b, 0x5140; prmt.b32 c, c, d, 0x5140; prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; }""",
            "=r,=r,r,r,f",
            [first, second, power],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        numbers = (first << 16, second << 16, first & -65536, second & -65536)
        low, high = tl.zeros_like(first), tl.zeros_like(first)
        for place in tl.static_range(4):
            number = numbers[place].to(tl.float32, bitcast=True)
            low += _whole(number, power, place, 0)
            high += _whole(number, power, place, 1)
    return low, high


@triton.jit
def _signed(word, PLACE: tl.constexpr):
    return (word << (24 - 8 * PLACE)) >> 24


@triton.constexpr_function
def _assembly(half):
    """The sum [$0] of eight codes of a word [$1] times numbers whose low and high bytes are [$2, $3] and [$4, $5]."""
    lines = ["and.b32 a, $1, 0x0f0f0f0f;", "shr.u32 b, $1, 4;", "and.b32 b, b, 0x0f0f0f0f;"]
    if half >= 0:
        lines += [f"prmt.b32 a, a, b, {('0x6240', '0x7351')[half]};"]
    lines += ["dp4a.u32.u32 l, a, $2, 0;", "dp4a.u32.s32 h, a, $3, 0;"]
    if half < 0:
        lines += ["dp4a.u32.u32 l, b, $4, l;", "dp4a.u32.s32 h, b, $5, h;"]
    return "{ .reg .b32 a, b, l, h; " + " ".join(lines) + " shl.b32 h, h, 8; add.s32 $0, h, l; }"


@triton.jit
def _sum_products(words, numbers, HALF: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Sums [S, 8, Q] of a thread's codes times numbers. HALF: those of half of the tile's columns alone, if it is not -1."""
    FIRST: tl.constexpr = 2 if HALF == 1 else 0
    OTHER: tl.constexpr = FIRST if HALF >= 0 else 2
    low, high, other_low, other_high = numbers[FIRST], numbers[FIRST + 1], numbers[OTHER], numbers[OTHER + 1]
    if ASSEMBLY:
        total = tl.inline_asm_elementwise(
            _assembly(HALF),
            "=r,r,r,r,r,r",
            [words, low, high, other_low, other_high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        total = tl.zeros_like(words)
        for place in tl.static_range(4):
            number = (low >> (8 * place) & 255) + 256 * _signed(high, place)
            other = (other_low >> (8 * place) & 255) + 256 * _signed(other_high, place)
            if HALF < 0:
                total += (words >> (8 * place) & 15) * number + (words >> (8 * place + 4) & 15) * other
            else:
                total += (words >> (8 * HALF + 4 * (place % 2) + 16 * (place // 2)) & 15) * number
    return tl.sum(tl.reshape(total, (8, 8, 4, 4)), axis=3).to(tl.float32)


@triton.jit
def _inputs(x_ptr, first_tile, GROUP: tl.constexpr, ASSEMBLY: tl.constexpr):
    """What eight rows of tiles are multiplied by: bytes of the inputs [S, 8, W], low and high, of the even parts and of the odd
    ones, or of a tile's first half and of its second one; their sums [S, 8, Q]; what 1 in these is worth."""
    place = (first_tile + tl.arange(0, 8))[:, None, None] * 64 + tl.arange(0, 16)[None, None, :]
    x = x_ptr + tl.broadcast_to(place, (8, 8, 16))
    first, second, third, fourth = tl.load(x), tl.load(x + 16), tl.load(x + 32), tl.load(x + 48)
    size = tl.max(tl.reshape(_largest(first, second, third, fourth, ASSEMBLY), (8, 8, 4, 4)), axis=3)
    exponent = tl.maximum(size >> 7, 15)
    power = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    power = tl.reshape(tl.broadcast_to(power[:, :, :, None], (8, 8, 4, 4)), (8, 8, 16))
    worth = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    worth = tl.where(size >= 0x7F80, float("nan"), worth)  # of what is not finite
    ones = tl.full((8, 8, 16), 0x11111111, tl.int32)
    if GROUP == 64:
        numbers = _bytes(first, second, power, ASSEMBLY) + _bytes(third, fourth, power, ASSEMBLY)
        totals = (_sum_products(ones, numbers, 0, ASSEMBLY), _sum_products(ones, numbers, 1, ASSEMBLY))
    else:
        numbers = _bytes(first, third, power, ASSEMBLY) + _bytes(second, fourth, power, ASSEMBLY)
        totals = (_sum_products(ones, numbers, -1, ASSEMBLY),)
    return numbers, totals, worth


@triton.jit
def vector_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    ROWS,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    R: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [N] = w @ x + bias, or that added to it; with an activation the gated pair's."""
    LAST: tl.constexpr = K // 128
    EACH: tl.constexpr = LAST // 8
    GROUPS: tl.constexpr = 2 if GROUP == 64 else 1
    IS_GATED: tl.constexpr = ACTIVATION >= 0
    OWN: tl.constexpr = R // 2 if IS_GATED else R
    first = tl.program_id(0) * (OWN * 8)
    w_ptr, x_ptr = w_ptr.to(tl.pointer_type(tl.int32)), x_ptr.to(tl.pointer_type(tl.int32))
    codes, scales = _codes(w_ptr, scale_ptr, first, N, ROWS, LAST, GROUP, OWN, R)
    await_previous(PDL, EARLY=True)
    sums = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.zeros((8, 8, 4), dtype=tl.float32),)
    for u in tl.static_range(EACH):
        numbers, totals, worth = _inputs(x_ptr, u * 8, GROUP, ASSEMBLY)
        new_sums = ()
        for r in tl.static_range(R):
            own = sums[r]
            for group in tl.static_range(GROUPS):
                both = scales[(r * EACH + u) * GROUPS + group]
                zero = zero_bits(both).to(tl.bfloat16, bitcast=True).to(tl.float32) - 128.0
                dots = _sum_products(codes[r * EACH + u], numbers, group if GROUPS == 2 else -1, ASSEMBLY)
                dots -= zero[:, :, None] * totals[group]
                own += scale_of(both, 0, 1)[:, :, None] * worth * dots
            new_sums = new_sums + (own,)
        sums = new_sums
    # Of all rows at once: threads exchange their sums once.
    place = first + tl.arange(0, 8)
    y = tl.join(tl.sum(sums[0], axis=2), tl.sum(sums[1], axis=2))
    if R == 4:
        place = place[:, None] + tl.arange(0, 2)[None, :] * 8
        y = tl.join(y, tl.join(tl.sum(sums[2], axis=2), tl.sum(sums[3], axis=2)))
    y = tl.sum(y, axis=0)
    if IS_GATED:
        gate, up = tl.split(y)
        if bias_ptr is not None:
            gate += tl.load(bias_ptr + place)
            up += tl.load(bias_ptr + N + place)
        y = activate(gate, ACTIVATION) * up
    else:
        place = tl.expand_dims(place, -1) + tl.arange(0, 2) * (4 * R)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + place)
    if ADD:
        y += tl.load(out_ptr + place).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty))


def choose(weight: PackedWeight, rows: int) -> VectorConfig | None:
    """The blocks for a product of so many rows; None if it is not for this kernel."""
    layout, config = weight.layout, VectorConfig()
    if not isinstance(layout, Tiles) or layout.kind != WHOLE_4 or rows != 1 or not (may_assemble() or interpreted()):
        return None
    if layout.columns != COLUMNS or layout.group % 64 or weight.dtype != torch.bfloat16 or weight.perm is not None:
        return None
    is_even = weight.in_features % (8 * COLUMNS) == 0 and weight.out_features % (8 * config.eights) == 0
    return config if is_even and weight.in_features <= MAX_COLUMNS else None


def launch_vector(
    x_TK: torch.Tensor,
    weight: PackedWeight,
    out_TN: torch.Tensor,
    config: VectorConfig,
    *,
    kind: str | None = None,
    add: bool = False,
) -> None:
    """One product of one bfloat16 row, or one added to `out`; `kind` is the activation of a gated pair."""
    layout, words = cast(Tiles, weight.layout), cast(torch.Tensor, weight.packed)
    n = out_TN.shape[1]
    vector_kernel[(cdiv(n, 8 * config.eights if kind is None else 4 * config.eights),)](
        x_TK,
        words,
        weight.scale,
        weight.bias,
        out_TN,
        n,
        words.shape[0] * BLOCK_ROWS,
        K=weight.in_features,
        GROUP=layout.group,
        ACTIVATION=-1 if kind is None else KINDS.index(kind),
        ADD=add,
        R=config.eights,
        ASSEMBLY=may_assemble(),
        num_warps=config.warps,
        **launch_options(),
    )
