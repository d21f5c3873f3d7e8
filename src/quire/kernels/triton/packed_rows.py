"""Codes in tiles times a few rows: what a layer does around its products is done on the way, and nothing is left for another.

A program has some rows of the weight, all of their columns. Each of its warps walks along its own share of the tiles (the first
dimension of everything here) and multiplies them on the tensor cores; the shares are added in the end, so that no program waits
for another. It sees the whole input: a norm before the product takes the squares' sum on the way, and an activation of gate
and up is made of a program's rows of each.

Legend: B shares, T rows of x, N outputs, K inputs, W words of a tile's row.
"""

import dataclasses
from typing import cast

import torch
import triton

from quire.kernels.packed import PackedWeight
from quire.kernels.triton.activations import KINDS, activate
from quire.kernels.triton.launch import cdiv, gdc_launch_dependents, gdc_wait, launch_options, num_processors, tl
from quire.kernels.triton.moe_grouped import shared_bytes
from quire.kernels.triton.packed_codes import BLOCK_ROWS, Tiles, decode, may_assemble, scale_of

MAX_ROWS = 8
"""Rows of x that a tensor operation takes at least."""
MIN_SHARES, MAX_SHARES = 4, 16
WARPS = 12
"""Warps of a multiprocessor that keep its loads coming."""


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Blocks of `packed_rows_kernel`.

    Attributes:
        block_n: rows of the weight of a program; of gate and up each.
        shares: warps, which share the columns.
        stages: tiles of a warp that are on their way, and one.
    """

    block_n: int = 32
    shares: int = 4
    stages: int = 3


@triton.jit
def _load(ptr, place, is_there, EVEN: tl.constexpr):
    """A tile's values; zero where it is behind the last."""
    if EVEN:
        values = tl.load(ptr + place)
    else:
        values = tl.load(ptr + place, mask=is_there, other=0)
    return values


@triton.jit
def _add_product(
    sums, dots, words, both, x, PART: tl.constexpr, PER_SCALE: tl.constexpr, SHARE: tl.constexpr, KIND: tl.constexpr,
    IS_HALF: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """(sums, dots) with a part's products in `dots`, which go to `sums`, scaled, with the last part of a group."""
    dots = tl.dot(decode(words, both, KIND, PART, IS_HALF, ASSEMBLY), x, dots)
    if PART % PER_SCALE == PER_SCALE - 1:
        sums += dots * scale_of(both, PART // PER_SCALE % SHARE, SHARE)[:, :, None]
        dots = tl.zeros_like(dots)
    return sums, dots


@triton.jit(do_not_specialize=["num_rows"])
def packed_rows_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    scale_ptr,
    perm_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    ROWS,
    eps,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_PERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = x @ w.T + bias, of rms_norm(x) with a norm, or that added to it; with an activation the gated pair's."""
    IS_HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    BLOCK: tl.constexpr = 128
    TILES: tl.constexpr = K // COLUMNS
    PARTS: tl.constexpr = COLUMNS // WORDS
    PER_SCALE: tl.constexpr = PARTS * GROUP // COLUMNS if COLUMNS > GROUP else PARTS
    EVEN: tl.constexpr = TILES % SHARES == 0
    first = tl.program_id(0) * BLOCK_N
    n, t, share, word = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T), tl.arange(0, SHARES), tl.arange(0, WORDS)
    inner = tl.arange(0, BLOCK_N)[:, None] * WORDS + word[None, :]
    inner = share[:, None, None] * (BLOCK * WORDS) + inner[None, :, :]
    w_tile = w_ptr + (first // BLOCK).to(tl.int64) * (TILES * BLOCK * WORDS) + first % BLOCK * WORDS + inner
    if ACTIVATION >= 0:
        up = N + first
        up_tile = w_ptr + (up // BLOCK).to(tl.int64) * (TILES * BLOCK * WORDS) + up % BLOCK * WORDS + inner
    is_row = (t < num_rows)[None, None, :]
    x_row = tl.minimum(t, num_rows - 1)[None, None, :] * K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros((SHARES, BLOCK_N, BLOCK_T), dtype=tl.float32)
    up_sums, squares = sums, tl.zeros((SHARES, WORDS, BLOCK_T), dtype=tl.float32)
    for start in tl.range(0, TILES, SHARES, num_stages=STAGES):
        tile = start + share
        is_there = tile < TILES
        words = _load(w_tile, start * (BLOCK * WORDS), is_there[:, None, None], EVEN)
        if ACTIVATION >= 0:
            up_words = _load(up_tile, start * (BLOCK * WORDS), is_there[:, None, None], EVEN)
        dots = tl.zeros_like(sums)
        up_dots = dots
        for part in tl.static_range(PARTS):
            if part % PER_SCALE == 0 and part // PER_SCALE % SHARE == 0:
                if COLUMNS > GROUP:
                    place = (tile * (COLUMNS // GROUP) + part // PER_SCALE) // SHARE * ROWS
                else:
                    place = tile * COLUMNS // GROUP * ROWS
                both = _load(scale_ptr, place[:, None] + n[None, :], is_there[:, None], EVEN)
                if ACTIVATION >= 0:
                    up_both = _load(scale_ptr, place[:, None] + n[None, :] + N, is_there[:, None], EVEN)
            column = (tile * COLUMNS)[:, None] + part * WORDS + word[None, :]
            if HAS_PERM:
                column = _load(perm_ptr, column, is_there[:, None], EVEN)
            x_there = is_row if EVEN else is_row & is_there[:, None, None]
            x = tl.load(x_ptr + x_row + column[:, :, None], mask=x_there, other=0.0)
            if HAS_NORM:
                wide = x.to(tl.float32)
                squares += wide * wide
                x = (wide * _load(norm_ptr, column, is_there[:, None], EVEN)[:, :, None]).to(x.dtype)
            sums, dots = _add_product(sums, dots, words, both, x, part, PER_SCALE, SHARE, KIND, IS_HALF, ASSEMBLY)
            if ACTIVATION >= 0:
                up_sums, up_dots = _add_product(
                    up_sums, up_dots, up_words, up_both, x, part, PER_SCALE, SHARE, KIND, IS_HALF, ASSEMBLY
                )
    y = tl.sum(sums, axis=0)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=0), axis=0) / K + eps)[None, :]
        y *= scale
    inside_N = n < N
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=inside_N, other=0.0)[:, None]
    if ACTIVATION >= 0:
        other = tl.sum(up_sums, axis=0)
        if HAS_NORM:
            other *= scale
        if HAS_BIAS:
            other += tl.load(bias_ptr + N + n, mask=inside_N, other=0.0)[:, None]
        y = activate(y, ACTIVATION) * other
    out = out_ptr + t[None, :] * N + n[:, None]
    inside = inside_N[:, None] & (t < num_rows)[None, :]
    if ADD:
        y += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)


def choose(weight: PackedWeight, *, is_gated: bool = False) -> RowsConfig | None:
    """The blocks for a weight: as many warps as keep the device's loads coming, each with two tiles at least. None where rows of
    gate and up cannot be taken together: neither's blocks may reach over a tile's rows."""
    config, layout, matrices = RowsConfig(), cast(Tiles, weight.layout), 2 if is_gated else 1
    if is_gated and weight.out_features % (2 * config.block_n):
        return None
    programs = cdiv(weight.out_features, config.block_n * matrices)
    _, tiles, _, words = cast(torch.Tensor, weight.packed).shape
    scales = max(layout.columns // layout.group // layout.share, 1)
    tile_bytes = matrices * config.block_n * (2 * words + 8 * scales) + layout.columns * (2 * MAX_ROWS + 4)
    room = shared_bytes() // (tile_bytes * (config.stages - 1))
    shares = MIN_SHARES
    while 2 * shares <= min(MAX_SHARES, room, tiles // 2) and programs * shares < WARPS * num_processors():
        shares *= 2
    return dataclasses.replace(config, shares=shares)


def launch_packed_rows(
    x_TK: torch.Tensor,
    weight: PackedWeight,
    out_TN: torch.Tensor,
    config: RowsConfig,
    *,
    norm_K: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: str | None = None,
    add: bool = False,
) -> None:
    """One product of at most `MAX_ROWS` rows, or one added to `out`; `kind` is the activation of a gated pair."""
    layout, words = cast(Tiles, weight.layout), cast(torch.Tensor, weight.packed)
    rows, n = out_TN.shape
    packed_rows_kernel[(cdiv(n, config.block_n),)](
        x_TK,
        norm_K,
        words,
        weight.scale,
        weight.perm,
        weight.bias,
        out_TN,
        rows,
        n,
        words.shape[0] * BLOCK_ROWS,
        eps,
        K=weight.in_features,
        GROUP=layout.group,
        COLUMNS=layout.columns,
        WORDS=words.shape[3],
        SHARE=layout.share,
        KIND=layout.kind,
        HAS_NORM=norm_K is not None,
        HAS_PERM=weight.perm is not None,
        HAS_BIAS=weight.bias is not None,
        ACTIVATION=-1 if kind is None else KINDS.index(kind),
        ADD=add,
        BLOCK_T=MAX_ROWS,
        BLOCK_N=config.block_n,
        SHARES=config.shares,
        STAGES=config.stages,
        ASSEMBLY=may_assemble(),
        num_warps=config.shares,
        **launch_options(),
    )
