"""Codes in tiles times any number of rows, on the tensor cores: read once for up to 64 rows, made numbers in registers.

A program owns a block of outputs for a block of rows and walks along the tiles, the next ones' codes and inputs on their way.
A scale is applied to the sums of its group, a zero to the codes: what is multiplied is exact. With `split` > 1 several programs
share a block's tiles; the last to finish adds their parts in order. Many rows are better served by making a band of the matrix
whole, which stays in the cache, and multiplying that with the library (`packed.py` decides).

Legend: T rows of x, N outputs, K inputs, W words of a tile's row, P scales of a tile's row.
"""

import functools
import math
from typing import cast

import torch
import triton

from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, num_processors, tl
from quire.kernels.triton.linear.dot import COUNTERS, split_workspace
from quire.kernels.triton.packed.layout import BLOCK_ROWS, Tiles, decode, may_assemble, scale_of
from quire.kernels.types import PackedWeight

MIN_BLOCK_T, MAX_BLOCK_T, INVARIANT_BLOCK_T = 8, 64, 32
MAX_SPLIT = 16
STAGES = {8: 3, 16: 4, 32: 4, 64: 4}
PROGRAMS = {8: 12, 16: 4, 32: 3, 64: 2}
"""Programs of one multiprocessor, by rows of a block: its registers hold no more."""
LARGE_PROGRAMS, LARGE_STAGES = 2, 6
"""Of the fewest rows and a matrix with a block for every multiprocessor."""
BAND_VALUES = 16 << 20
"""Values of a band of a matrix that is made whole: 32 MiB, which an H100's cache still holds."""


@triton.jit
def _scales(ptr, tile, first: tl.constexpr, n_N, ROWS, GROUP: tl.constexpr, COLUMNS: tl.constexpr, SHARE: tl.constexpr):
    """Scales and zeros [N] of a tile's groups from number `first` on, as many as stand in a word."""
    word = (tile * (COLUMNS // GROUP) + first) // SHARE if COLUMNS > GROUP else tile * COLUMNS // GROUP
    return tl.load(ptr + word * ROWS + n_N)


@triton.jit
def scaled(w_NW, scale_N, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Codes' numbers times scales that came in so many bits, rounded to the model's type once."""
    IS_HALF: tl.constexpr = w_NW.dtype == tl.float16
    # The type itself holds the scale: the product of two such numbers rounds as that of floats, in a quarter of the work.
    if ASSEMBLY and (BITS == 16 if IS_HALF else BITS == 8):
        w_NW *= scale_N[:, None].to(w_NW.dtype)
    else:
        w_NW = (w_NW.to(tl.float32) * scale_N[:, None]).to(w_NW.dtype)
    return w_NW


@triton.jit
def add_tiles(
    sums_NT,
    x_rows,
    is_row,
    w_tile,
    scale_ptr,
    perm_ptr,
    n,
    ROWS,
    first,
    last,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_PERM: tl.constexpr,
    SCALES_CODES: tl.constexpr,
    STAGES: tl.constexpr,
    IS_HALF: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Sums, and the products of tiles `first` to `last` with them. `w_tile` points to the words of the first of all tiles,
    `x_rows` [1, T] to rows of WIDTH columns. SCALES_CODES: scales are applied to codes, which rounds them to the model's type,
    rather than to sums."""
    BLOCK: tl.constexpr = 128
    PARTS: tl.constexpr = COLUMNS // WORDS
    PER_SCALE: tl.constexpr = PARTS * GROUP // COLUMNS if COLUMNS > GROUP else PARTS
    word = tl.arange(0, WORDS)
    for tile in tl.range(first, last, num_stages=STAGES):
        words = tl.load(w_tile + tile * (BLOCK * WORDS))
        for scale in tl.static_range(PARTS // PER_SCALE):
            if scale % SHARE == 0:
                both = _scales(scale_ptr, tile, scale, n, ROWS, GROUP, COLUMNS, SHARE)
            dots = sums_NT if SCALES_CODES else tl.zeros_like(sums_NT)
            for inner in tl.static_range(PER_SCALE):
                column = tile * COLUMNS + (scale * PER_SCALE + inner) * WORDS + word
                is_there = is_row
                if WIDTH < K:
                    is_there = is_row & (column < WIDTH)[:, None]
                if HAS_PERM:
                    column = tl.load(perm_ptr + column)
                x = tl.load(x_rows + column[:, None], mask=is_there, other=0.0)
                w = decode(words, both, KIND, scale * PER_SCALE + inner, IS_HALF, ASSEMBLY)
                if SCALES_CODES:
                    w = scaled(
                        w, scale_of(both, scale % SHARE, SHARE), both.dtype.primitive_bitwidth // SHARE, ASSEMBLY
                    )
                dots = tl.dot(w, x, dots)
            sums_NT = dots if SCALES_CODES else sums_NT + dots * scale_of(both, scale % SHARE, SHARE)[:, None]
    return sums_NT


@triton.jit
def sum_parts(sums_NT, partial_ptr, counter_ptr, place, part, split, is_row, MOST: tl.constexpr):
    """(sums over all `split` programs that share a place, in order, whether this is the last of them): only the last one's sums
    are whole."""
    N: tl.constexpr = sums_NT.shape[0]
    T: tl.constexpr = sums_NT.shape[1]
    at = tl.arange(0, T)[None, :] * N + tl.arange(0, N)[:, None]
    mine = partial_ptr + (place * split).to(tl.int64) * (N * T) + at
    tl.store(mine + part * (N * T), sums_NT, mask=is_row)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr + place, 1, sem="acq_rel", scope="gpu") == split - 1
    if is_last:
        sums_NT = tl.load(mine, mask=is_row, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, MOST):
            is_there = is_row & (other < split)
            sums_NT += tl.load(mine + other * (N * T), mask=is_there, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr + place, 0)
    return sums_NT, is_last


@triton.jit(do_not_specialize=["num_rows", "length", "split"])
def tiles_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    perm_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    N,
    ROWS,
    length,
    split,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_PERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MOST: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = x @ w.T + bias, or that added to it. length: tiles that a program multiplies; `split`, at
    most MOST, programs share a block's tiles."""
    IS_HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    TILES: tl.constexpr = K // COLUMNS
    BLOCK: tl.constexpr = 128
    block_n, block_t, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    t = block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = (t < num_rows)[None, :]
    x_rows = x_ptr + tl.minimum(t, num_rows - 1).to(tl.int64)[None, :] * K
    first = part * length
    last = tl.minimum(first + length, TILES)
    word = tl.arange(0, WORDS)
    start = block_n * BLOCK_N // BLOCK
    inside = block_n * BLOCK_N % BLOCK + tl.arange(0, BLOCK_N)
    block = w_ptr + (start.to(tl.int64) * TILES * BLOCK * WORDS)
    await_previous(PDL, EARLY=True)
    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    w_tile = block + inside[:, None] * WORDS + word[None, :]
    sums = add_tiles(
        sums,
        x_rows,
        is_row,
        w_tile,
        scale_ptr,
        perm_ptr,
        n,
        ROWS,
        first,
        last,
        K,
        K,
        GROUP,
        COLUMNS,
        WORDS,
        SHARE,
        KIND,
        HAS_PERM,
        False,
        STAGES,
        IS_HALF,
        ASSEMBLY,
    )
    if MOST > 1:
        place = block_t * tl.num_programs(0) + block_n
        sums, is_last = sum_parts(sums, partial_ptr, counter_ptr, place, part, split, is_row, MOST)
        if is_last:
            finish(sums, bias_ptr, out_ptr, n, t, num_rows, N, HAS_BIAS, ADD)
    else:
        finish(sums, bias_ptr, out_ptr, n, t, num_rows, N, HAS_BIAS, ADD)


@triton.jit
def finish(sums_NT, bias_ptr, out_ptr, n, t, num_rows, N, HAS_BIAS: tl.constexpr, ADD: tl.constexpr):
    """Bias, residual, and out to memory."""
    if HAS_BIAS:
        sums_NT += tl.load(bias_ptr + n, mask=n < N, other=0.0)[:, None]
    out = out_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
    inside = (t < num_rows)[:, None] & (n < N)[None, :]
    y = tl.trans(sums_NT)
    if ADD:
        y += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def expand_kernel(
    w_ptr,
    scale_ptr,
    out_ptr,
    first_block,
    ROWS,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARE: tl.constexpr,
    KIND: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """A band of the matrix, out [rows, K] in the model's type."""
    IS_HALF: tl.constexpr = out_ptr.dtype.element_ty == tl.float16
    TILES: tl.constexpr = K // COLUMNS
    PARTS: tl.constexpr = COLUMNS // WORDS
    PER_SCALE: tl.constexpr = PARTS * GROUP // COLUMNS if COLUMNS > GROUP else PARTS
    BLOCK: tl.constexpr = 128
    tile, block = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK)
    n = (first_block + block) * BLOCK + row
    word = tl.arange(0, WORDS)
    at = ((first_block + block).to(tl.int64) * TILES + tile) * (BLOCK * WORDS)
    words = tl.load(w_ptr + at + row[:, None] * WORDS + word[None, :])
    await_previous(PDL, EARLY=True)
    out = out_ptr + (block * BLOCK + row).to(tl.int64)[:, None] * K + tile * COLUMNS + word[None, :]
    for part in tl.static_range(PARTS):
        both = _scales(scale_ptr, tile, part // PER_SCALE, n, ROWS, GROUP, COLUMNS, SHARE)
        value = decode(words, both, KIND, part, IS_HALF, ASSEMBLY).to(tl.float32)
        value *= scale_of(both, part // PER_SCALE % SHARE, SHARE)[:, None]
        tl.store(out + part * WORDS, value.to(out_ptr.dtype.element_ty))


def launch_tiles(
    x_TK: torch.Tensor,
    weight: PackedWeight,
    out_TN: torch.Tensor,
    *,
    is_invariant: bool,
    add: bool = False,
) -> None:
    """One product, or one added to `out`. Sums depend on the number of rows unless `is_invariant`."""
    layout, words = cast(Tiles, weight.layout), cast(torch.Tensor, weight.packed)
    (rows, n), tiles = out_TN.shape, words.shape[1]
    block_t = INVARIANT_BLOCK_T if is_invariant else min(max(next_power_of_2(rows), MIN_BLOCK_T), MAX_BLOCK_T)
    blocks = words.shape[0], cdiv(rows, block_t)
    partial, counter = split_workspace(x_TK.device)
    programs, stages, split = PROGRAMS[block_t], STAGES[block_t], 1
    if block_t == MIN_BLOCK_T and blocks[0] >= num_processors():
        programs, stages = LARGE_PROGRAMS, LARGE_STAGES
    if not is_invariant and blocks[0] * blocks[1] <= COUNTERS:
        room = num_processors() * programs // (blocks[0] * blocks[1])
        most = partial.numel() // (blocks[0] * blocks[1] * BLOCK_ROWS * block_t)
        split = max(min(room, most, MAX_SPLIT, tiles // 2), 1)
    length = cdiv(tiles, split)
    split = cdiv(tiles, length)
    tiles_kernel[(*blocks, split)](
        x_TK,
        words,
        weight.scale,
        weight.perm,
        weight.bias,
        out_TN,
        partial,
        counter,
        rows,
        n,
        blocks[0] * BLOCK_ROWS,
        length,
        split,
        K=weight.in_features,
        GROUP=layout.group,
        COLUMNS=layout.columns,
        WORDS=words.shape[3],
        SHARE=layout.share,
        KIND=layout.kind,
        HAS_PERM=weight.perm is not None,
        HAS_BIAS=weight.bias is not None,
        ADD=add,
        BLOCK_T=block_t,
        BLOCK_N=BLOCK_ROWS,
        MOST=next_power_of_2(split),
        STAGES=stages,
        ASSEMBLY=may_assemble(),
        num_warps=4,
        **launch_options(),
    )


@functools.cache
def reserve_band(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Where bands are made whole; to be asked for before the first product is captured in a graph.

    One product loads the library (about 0.2 s): now, and not in the first long prompt's step, which others share.
    """
    band = torch.zeros(BAND_VALUES, dtype=dtype, device=device)
    side = min(512, math.isqrt(BAND_VALUES))
    square = band[: side * side].view(side, side)
    torch.mm(square, square.t())
    return band


def launch_bands(x_TK: torch.Tensor, weight: PackedWeight, out_TN: torch.Tensor, *, add: bool = False) -> None:
    """As `launch_tiles`, band by band with the library: for many rows."""
    layout, words = cast(Tiles, weight.layout), cast(torch.Tensor, weight.packed)
    n, k = weight.out_features, weight.in_features
    if weight.perm is not None:
        x_TK = x_TK[:, weight.perm]
    band = reserve_band(x_TK.device, x_TK.dtype)
    num_blocks = max(band.numel() // (k * BLOCK_ROWS), 1)
    for first in range(0, words.shape[0], num_blocks):
        blocks = min(num_blocks, words.shape[0] - first)
        matrix_NK = band[: blocks * BLOCK_ROWS * k].view(-1, k)
        expand_kernel[(words.shape[1], blocks)](
            words,
            weight.scale,
            matrix_NK,
            first,
            words.shape[0] * BLOCK_ROWS,
            K=k,
            GROUP=layout.group,
            COLUMNS=layout.columns,
            WORDS=words.shape[3],
            SHARE=layout.share,
            KIND=layout.kind,
            ASSEMBLY=may_assemble(),
            num_warps=4,
            **launch_options(),
        )
        rows = slice(first * BLOCK_ROWS, min((first + blocks) * BLOCK_ROWS, n))
        matrix_KN, out = matrix_NK[: rows.stop - rows.start].t(), out_TN[:, rows]
        if add:
            out.addmm_(x_TK, matrix_KN)
        else:
            torch.mm(x_TK, matrix_KN, out=out)
        if weight.bias is not None:
            out += weight.bias[rows]
