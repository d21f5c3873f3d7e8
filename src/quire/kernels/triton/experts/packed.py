"""Experts as codes in tiles: their products with the rows that chose them, read once for up to a block of rows.

A program has 128 rows of one expert's matrix (of gate and up 64 each) and a block of the expert's pairs, which it gathers by the
expert's list and scatters in the end. Few rows are bound by the bytes read: several programs share a block's tiles, and a scale
is applied to the sums of its group. Many rows are bound by the tensor cores: scales are applied to the codes, which makes them
the numbers that a plain matrix would have.

Legend: P pairs of a token and one of its experts, E experts, N outputs, K inputs, W words of a tile's row.
"""

import dataclasses
from typing import cast

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.triton.experts.grouped import gated, locate, shared_bytes, stages_within, ungated
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, num_processors, tl
from quire.kernels.triton.linear.dot import COUNTERS, split_workspace
from quire.kernels.triton.norm.activations import KINDS
from quire.kernels.triton.packed.layout import (
    BLOCK_ROWS,
    Tiles,
    layout_of,
    may_assemble,
    scale_sizes,
    tiled,
    with_whole_tiles,
)
from quire.kernels.triton.packed.tiles import MAX_SPLIT, PROGRAMS, STAGES, add_tiles, sum_parts
from quire.kernels.types import ClampedSwiglu, ExpertCodes, ExpertScratch, PackedWeight


@dataclasses.dataclass(frozen=True)
class PackedConfig:
    """Blocks of `packed_experts_kernel`.

    Attributes:
        block_t: pairs of a program.
        splits: programs may share a block's tiles.
        scales_codes: scales are applied to codes rather than to sums.
    """

    block_t: int
    stages: int
    num_warps: int = 4
    splits: bool = False
    scales_codes: bool = False


FEW = {block: PackedConfig(block, STAGES[block], splits=True) for block in (8, 16)}
SOME = {block: PackedConfig(block, 4, scales_codes=True) for block in (32, 64)}
MANY = PackedConfig(128, 3, num_warps=8, scales_codes=True)
INVARIANT = SOME[32]
"""The one way in which every row is computed where its bits must not depend on the batch."""


def choose(mean: float) -> PackedConfig:
    """The way to compute experts that have so many pairs in the mean: few ones fit into one block, also twice as many."""
    if mean <= 8:
        return FEW[8 if mean <= 4 else 16]
    return SOME[32] if mean <= 24 else SOME[64] if mean <= 96 else MANY


@triton.jit(do_not_specialize=["length", "split"])
def packed_experts_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    weights_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    counts_ptr,
    lists_ptr,
    num_experts,
    N,
    ROWS,
    capacity,
    length,
    split,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARE: tl.constexpr,
    CODES: tl.constexpr,
    ROW_DIVISOR: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALES_CODES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MOST: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = x[pair // ROW_DIVISOR] @ w[expert of pair].T, as `moe_grouped.grouped_kernel`; x is WIDTH wide, w K. ROWS: of
    an expert in tiles. length: tiles that a program multiplies; `split`, at most MOST, programs share a block's tiles."""
    IS_HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    TILES: tl.constexpr = K // COLUMNS
    BLOCK: tl.constexpr = 128
    block_n, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, BLOCK)
    await_previous(PDL, EARLY=True)
    expert, own, count = locate(counts_ptr, num_experts, tile, BLOCK_T, BLOCK_E)
    expert = expert.to(tl.int64)
    if own * BLOCK_T < count:
        slot_T = own * BLOCK_T + tl.arange(0, BLOCK_T)
        is_row = (slot_T < count)[None, :]
        pair_T = tl.load(lists_ptr + expert * capacity + tl.minimum(slot_T, count - 1))
        x_rows = x_ptr + (pair_T // ROW_DIVISOR).to(tl.int64)[None, :] * WIDTH
        w_tile = w_ptr + (expert * (ROWS // BLOCK) + block_n) * (TILES * BLOCK * WORDS)
        w_tile += row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        first = part * length
        sums = add_tiles(
            tl.zeros((BLOCK, BLOCK_T), dtype=tl.float32),
            x_rows,
            is_row,
            w_tile,
            scale_ptr + expert * (K // GROUP // SHARE) * ROWS,
            None,
            block_n * BLOCK + row,
            ROWS,
            first,
            tl.minimum(first + length, TILES),
            WIDTH,
            K,
            GROUP,
            COLUMNS,
            WORDS,
            SHARE,
            CODES,
            False,
            SCALES_CODES,
            STAGES,
            IS_HALF,
            ASSEMBLY,
        )
        is_last = True
        if MOST > 1:
            place = tile * tl.num_programs(0) + block_n
            sums, is_last = sum_parts(sums, partial_ptr, counter_ptr, place, part, split, is_row, MOST)
        if is_last:
            share = tl.load(weights_ptr + pair_T)[None, :] if SCALED or WEIGHTED else 0.0
            if KIND >= 0:
                HALF: tl.constexpr = BLOCK // 2
                gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, BLOCK_T)), (1, 2, 0)))
                column = block_n * HALF + tl.arange(0, HALF)
                if bias_ptr is not None:
                    bias_ptr += expert * 2 * N
                y = gated(gate, up, bias_ptr, column[:, None], N, share, KIND, SCALED, CLAMPED, ALPHA, LIMIT)
            else:
                column = block_n * BLOCK + row
                if bias_ptr is not None:
                    bias_ptr += expert * N
                y = ungated(sums, bias_ptr, column[:, None], N, share, ACTIVATION, SCALED)
            if WEIGHTED:
                y *= share
            out = out_ptr + pair_T.to(tl.int64)[:, None] * N + column[None, :]
            inside = (slot_T < count)[:, None] & (column < N)[None, :]
            tl.store(out, tl.trans(y).to(out_ptr.dtype.element_ty), mask=inside)


def _by_turns(weight: PackedWeight) -> PackedWeight:
    """Rows of gate and up in turn, as many as half a block has; rows of zeros behind the last."""
    half, width = BLOCK_ROWS // 2, weight.out_features // 2
    blocks = cdiv(width, half)

    def turned(values: torch.Tensor) -> torch.Tensor:
        bytes_2NB = values.contiguous().view(torch.uint8).unflatten(0, (2, width))
        bytes_2NB = torch.nn.functional.pad(bytes_2NB, (0, 0, 0, blocks * half - width))
        return bytes_2NB.unflatten(1, (blocks, half)).transpose(0, 1).flatten(0, 2).contiguous().view(values.dtype)

    codes, scale_NG = weight.plain()
    zero = None if weight.zero is None else turned(weight.zero)
    return dataclasses.replace(
        weight, out_features=2 * blocks * half, data=turned(codes), scale=turned(scale_NG), zero=zero
    )


@kernel("pack_expert_codes", platform="cuda", priority=10)
def pack_expert_codes(experts: list[PackedWeight], *, is_gated: bool) -> ExpertCodes | None:
    """As `packed.pack_expert_codes`: each in tiles (`packed_codes.tiled`), gate and up in turn."""
    first, count = experts[0], len(experts)
    layouts = {None if weight.perm is not None else layout_of(weight, may_pad=True) for weight in experts}
    layout = layouts.pop()
    if layout is None or layouts:
        return None
    sizes = set.intersection(*(scale_sizes(weight, layout) for weight in experts))
    split_workspace(first.plain()[0].device)
    stacks: list[torch.Tensor] = []
    for number in range(count):
        weight = experts.pop(0)
        ready = tiled(with_whole_tiles(_by_turns(weight) if is_gated else weight, layout), layout, min(sizes))
        parts = [cast(torch.Tensor, part) for part in (ready.packed, ready.scale)]
        stacks = stacks or [part.new_empty(count, *part.shape) for part in parts]
        layout = cast(Tiles, ready.layout)
        for stack, part in zip(stacks, parts, strict=True):
            stack[number] = part
    return ExpertCodes(
        first.out_features, first.in_features, first.dtype, None, stacks[0], scale=stacks[1], layout=layout, count=count
    )


def launch_packed_experts(
    x: torch.Tensor,
    weight: ExpertCodes,
    out_PN: torch.Tensor,
    rows: int,
    scratch: ExpertScratch,
    config: PackedConfig,
    *,
    divisor: int,
    kind: str | None = None,
    activation: str | None = None,
    weighted: bool = False,
    scaled: bool = False,
    bias: torch.Tensor | None = None,
    clamp: ClampedSwiglu | None = None,
) -> None:
    """As `moe_grouped.launch_grouped`, for what `pack_expert_codes` made."""
    layout, words = cast(Tiles, weight.layout), cast(torch.Tensor, weight.packed)
    num_experts, blocks, tiles = words.shape[:3]
    if config == FEW[8] and words.shape[4] < 32:  # so little of eight rows is no asynchronous copy
        config = FEW[16]
    block_t = config.block_t
    tile_bytes = 2 * (BLOCK_ROWS * words.shape[4] + layout.columns * block_t) + 4 * BLOCK_ROWS
    places = blocks * (rows // block_t + min(num_experts, rows))
    partial, counter = split_workspace(x.device)
    split = 1
    if config.splits and places <= COUNTERS:
        room = num_processors() * PROGRAMS[block_t] // places
        most = partial.numel() // (places * BLOCK_ROWS * block_t)
        split = max(min(room, most, MAX_SPLIT, tiles // 2), 1)
    length = cdiv(tiles, split)
    split = cdiv(tiles, length)
    packed_experts_kernel[(blocks, places // blocks, split)](
        x,
        words,
        weight.scale,
        scratch.weights_TK,
        bias,
        out_PN,
        partial,
        counter,
        scratch.counts_E,
        scratch.lists_ET,
        num_experts,
        out_PN.shape[1],
        blocks * BLOCK_ROWS,
        scratch.capacity,
        length,
        split,
        WIDTH=weight.in_features,
        K=tiles * layout.columns,
        GROUP=layout.group,
        COLUMNS=layout.columns,
        WORDS=words.shape[4],
        SHARE=layout.share,
        CODES=layout.kind,
        ROW_DIVISOR=divisor,
        KIND=-1 if kind is None else KINDS.index(kind),
        ACTIVATION=-1 if activation is None else KINDS.index(activation),
        WEIGHTED=weighted,
        SCALED=scaled,
        CLAMPED=clamp is not None if clamp is None or clamp.offset else 2,
        ALPHA=0.0 if clamp is None else clamp.alpha,
        LIMIT=0.0 if clamp is None else clamp.limit,
        SCALES_CODES=config.scales_codes,
        BLOCK_T=block_t,
        BLOCK_E=next_power_of_2(num_experts),
        MOST=next_power_of_2(split),
        STAGES=stages_within(config.stages, tile_bytes, shared_bytes()),
        ASSEMBLY=may_assemble(),
        num_warps=config.num_warps,
        **launch_options(),
    )
