"""Products of many tokens with their experts' matrices on the tensor cores, each matrix read once for all of its tokens.

A program has a block of one expert's outputs, and either walks over all of the expert's tokens (where they are few) or has a
block of them (where they are many). Rows are gathered by the expert's list on the way in and scattered on the way out.

Legend: P pairs of a token and one of its experts, E experts, K experts a token, D hidden, I intermediate.
"""

import dataclasses
import functools

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.launch import (
    await_previous,
    cdiv,
    current_device,
    interpreted,
    launch_options,
    next_power_of_2,
    tl,
)
from quire.kernels.triton.norm.activations import KINDS, activate
from quire.kernels.types import ClampedSwiglu, ExpertScratch


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """Blocks of `grouped_kernel`.

    Attributes:
        swap: the weight is the left operand of the tensor cores, whose left side is at least 64 long where its right side
            may be 8.
        walk: a program walks over all tokens of its expert.
        bulk: the weight's tiles come by the device's bulk copies (compute capability 9.0 and up).
    """

    swap: bool
    walk: bool
    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    bulk: bool = False


@triton.jit
def locate(counts_ptr, num_experts, tile, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, the tile's number among the expert's own, the expert's rows) of a tile; rows is 0 behind the last tile."""
    expert_E = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts_ptr + expert_E, mask=expert_E < num_experts, other=0)
    tiles_E = (count_E + BLOCK_M - 1) // BLOCK_M
    end_E = tl.cumsum(tiles_E, axis=0)
    expert = tl.sum((end_E <= tile).to(tl.int32), axis=0)
    is_it_E = expert_E == expert
    before = tl.sum(tl.where(is_it_E, end_E - tiles_E, 0), axis=0)
    rows = tl.sum(tl.where(is_it_E, count_E, 0), axis=0)
    return tl.minimum(expert, num_experts - 1), tile - before, rows


@triton.jit
def _zeros(M: tl.constexpr, N: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        return tl.zeros((N, M), dtype=tl.float32)
    else:
        return tl.zeros((M, N), dtype=tl.float32)


@triton.jit
def _load_x(x_rows, at_K, D, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x_rows + at_K[None, :])
    else:
        return tl.load(x_rows + at_K[None, :], mask=(at_K < D)[None, :], other=0.0)


@triton.jit
def _dot(x, w, sums, SWAP: tl.constexpr):
    if SWAP:
        return tl.dot(w, tl.trans(x.to(w.dtype)), sums, input_precision="ieee")
    else:
        return tl.dot(x.to(w.dtype), tl.trans(w), sums, input_precision="ieee")


@triton.jit
def gated(
    gate,
    up,
    bias_ptr,
    column,
    N,
    share,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The activation of a gated pair of blocks. `column` and `share` (the rows' weights) fit their shape; a bias is the
    expert's, gate's values and then up's."""
    if SCALED:  # the product of a scaled input is the scaled product
        gate *= share
        up *= share
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + column, mask=column < N, other=0.0)
        up += tl.load(bias_ptr + N + column, mask=column < N, other=0.0)
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if CLAMPED != 2:
            up += 1.0
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * up
    else:
        return activate(gate, KIND) * up


@triton.jit
def ungated(y, bias_ptr, column, N, share, ACTIVATION: tl.constexpr, SCALED: tl.constexpr):
    """As `gated`, of a block of one matrix; ACTIVATION < 0: none."""
    if SCALED:
        y *= share
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < N, other=0.0)
    if ACTIVATION >= 0:
        y = activate(y, ACTIVATION)
    return y


@triton.jit
def grouped_kernel(
    x_ptr,
    w_ptr,
    weights_ptr,
    out_ptr,
    counts_ptr,
    lists_ptr,
    bias_ptr,
    num_experts,
    N,
    D,
    capacity,
    ROW_DIVISOR: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SWAP: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    BULK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = x[pair // ROW_DIVISOR] @ w[expert of pair].T, N outputs from D inputs. KIND >= 0: the weight has 2 N rows,
    gate and up, a program's BLOCK_N rows are the two by turns, and out is act(gate) * up. WEIGHTED: times the pair's weight;
    SCALED: x is. A bias [experts, rows] is added, CLAMPED (2: without an offset) stands in the place of an activation
    (`experts.ClampedSwiglu`).
    ACTIVATION >= 0: of a product without a gate.
    BULK: w is a descriptor of all experts' rows under one another, in blocks [rows, BLOCK_K]: half of BLOCK_N for a gated
    pair, whose halves are two products then."""
    blocks_n = tl.cdiv(N, BLOCK_N // 2 if KIND >= 0 else BLOCK_N)
    block_n = tl.program_id(0) % blocks_n
    tile = tl.program_id(0) // blocks_n
    n = tl.arange(0, BLOCK_N)
    if KIND >= 0:
        row_N = tl.minimum(block_n * (BLOCK_N // 2) + n // 2, N - 1) + (n % 2) * N
        rows_of_expert = 2 * N
    else:
        row_N = tl.minimum(block_n * BLOCK_N + n, N - 1)
        rows_of_expert = N
    column_K = tl.arange(0, BLOCK_K)
    await_previous(PDL, EARLY=True)
    if WALK:
        expert = tile
        count = tl.load(counts_ptr + expert)
        first = 0
        last = count
    else:
        expert, own, count = locate(counts_ptr, num_experts, tile, BLOCK_M, BLOCK_E)
        first = own * BLOCK_M
        last = tl.minimum(first + BLOCK_M, count)
    if bias_ptr is not None:
        bias_ptr += tl.cast(expert, tl.int64) * rows_of_expert
    if not BULK:
        w_rows = w_ptr + (tl.cast(expert, tl.int64) * rows_of_expert + row_N)[:, None] * D
    for start_m in range(first, last, BLOCK_M):
        slot_M = start_m + tl.arange(0, BLOCK_M)
        inside_M = slot_M < count
        pair_M = tl.load(lists_ptr + tl.cast(expert, tl.int64) * capacity + tl.minimum(slot_M, count - 1))
        x_rows = x_ptr + (pair_M // ROW_DIVISOR).to(tl.int64)[:, None] * D
        if BULK and KIND >= 0:
            HALF: tl.constexpr = BLOCK_N // 2
            row = expert * rows_of_expert + block_n * HALF
            gate = _zeros(BLOCK_M, HALF, SWAP)
            up = _zeros(BLOCK_M, HALF, SWAP)
            for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
                x = _load_x(x_rows, start + column_K, D, EVEN_K)
                gate = _dot(x, w_ptr.load([row, start]), gate, SWAP)
                up = _dot(x, w_ptr.load([row + N, start]), up, SWAP)
            column_N = block_n * HALF + tl.arange(0, HALF)
            share_M = tl.load(weights_ptr + pair_M) if SCALED else 0.0
            if SWAP:
                at_N, share = column_N[:, None], share_M[None, :] if SCALED else 0.0
                y = tl.trans(gated(gate, up, bias_ptr, at_N, N, share, KIND, SCALED, CLAMPED, ALPHA, LIMIT))
            else:
                at_N, share = column_N[None, :], share_M[:, None] if SCALED else 0.0
                y = gated(gate, up, bias_ptr, at_N, N, share, KIND, SCALED, CLAMPED, ALPHA, LIMIT)
        else:
            sums = _zeros(BLOCK_M, BLOCK_N, SWAP)
            for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
                at_K = start + column_K
                x = _load_x(x_rows, at_K, D, EVEN_K)
                if BULK:
                    w = w_ptr.load([expert * rows_of_expert + block_n * BLOCK_N, start])
                elif EVEN_K:
                    w = tl.load(w_rows + at_K[None, :])
                else:
                    w = tl.load(w_rows + at_K[None, :], mask=(at_K < D)[None, :], other=0.0)
                sums = _dot(x, w, sums, SWAP)
            if SWAP:
                y = tl.trans(sums)
            else:
                y = sums
            if KIND >= 0:
                gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
                column_N = block_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
                share = tl.load(weights_ptr + pair_M)[:, None] if SCALED else 0.0
                y = gated(gate, up, bias_ptr, column_N[None, :], N, share, KIND, SCALED, CLAMPED, ALPHA, LIMIT)
            else:
                column_N = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
                share = tl.load(weights_ptr + pair_M)[:, None] if SCALED else 0.0
                y = ungated(y, bias_ptr, column_N[None, :], N, share, ACTIVATION, SCALED)
        if WEIGHTED:
            y *= tl.load(weights_ptr + pair_M)[:, None]
        out = out_ptr + pair_M.to(tl.int64)[:, None] * N + column_N[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside_M[:, None] & (column_N < N)[None, :])


@triton.jit(do_not_specialize=["num_rows", "first", "count_here"])
def combine_kernel(
    pairs_ptr,
    out_ptr,
    num_tokens_ptr,
    counts_ptr,
    ids_ptr,
    first,
    count_here,
    num_rows,
    num_experts,
    D,
    K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] (+)= the sum of the token's pairs, in order. Clears the counts for the next mixture. With ids, only pairs whose
    expert is one of `count_here` from `first` on."""
    await_previous(PDL)
    if tl.program_id(0) + tl.program_id(1) == 0:
        expert_E = tl.arange(0, BLOCK_E)
        tl.store(counts_ptr + expert_E, tl.zeros((BLOCK_E,), dtype=tl.int32), mask=expert_E < num_experts)
    token = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(num_tokens_ptr).to(tl.int32), num_rows)
    if token < count:
        at_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside_D = at_D < D
        total_D = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for k in tl.static_range(K):
            inside = inside_D
            if ids_ptr is not None:
                here = tl.load(ids_ptr + token * K + k) - first
                inside = inside_D & (here >= 0) & (here < count_here)
            total_D += tl.load(pairs_ptr + (token * K + k) * D + at_D, mask=inside, other=0.0).to(tl.float32)
        out = out_ptr + token * D + at_D
        if ADD:
            total_D += tl.load(out, mask=inside_D, other=0.0).to(tl.float32)
        tl.store(out, total_D.to(out_ptr.dtype.element_ty), mask=inside_D)


@functools.cache
def shared_bytes() -> int:
    """What one program may have of a processor's shared memory."""
    if interpreted():
        return 1 << 20
    utilities = triton.runtime.driver.active.utils
    return utilities.get_device_properties(current_device())["max_shared_mem"]


@functools.cache
def _stages(config: GroupedConfig, item_size: int, shared_bytes: int) -> int:
    return stages_within(config.stages, (config.block_m + config.block_n) * config.block_k * item_size, shared_bytes)


def stages_within(stages: int, tile_bytes: int, shared_bytes: int) -> int:
    """Tiles in flight: as many as wanted, or as there is room for on a smaller device; at least two."""
    return max(min(stages, (shared_bytes - 1024) // tile_bytes), 2)


def _describe(w_END: torch.Tensor, config: GroupedConfig, is_pair: bool) -> TensorDescriptor:
    """All experts' rows under one another, for bulk copies."""
    rows = config.block_n // 2 if is_pair else config.block_n
    return TensorDescriptor.from_tensor(w_END.view(-1, w_END.shape[2]), [rows, config.block_k])


def launch_grouped(
    x: torch.Tensor,
    w_END: torch.Tensor,
    out_PN: torch.Tensor,
    rows: int,
    scratch: ExpertScratch,
    config: GroupedConfig,
    *,
    divisor: int,
    kind: str | None = None,
    activation: str | None = None,
    weighted: bool = False,
    scaled: bool = False,
    bias: torch.Tensor | None = None,
    clamp: ClampedSwiglu | None = None,
) -> None:
    """One product for the pairs in the scratch's lists.

    Args:
        rows: pairs at most.
        divisor: x's row of a pair is pair // divisor.
        kind: the activation of a gated pair of matrices; None is a plain matrix.
        activation: of a plain matrix.
        weighted: results are multiplied by the pairs' weights.
        scaled: inputs are multiplied by the pairs' weights.
        bias: float32, a row an expert.
        clamp: in the place of the activation.
    """
    num_experts, w_rows, width = w_END.shape
    n = w_rows if kind is None else w_rows // 2
    blocks_n = cdiv(n, config.block_n if kind is None else config.block_n // 2)
    tiles = num_experts if config.walk else rows // config.block_m + min(num_experts, rows)
    grouped_kernel[(tiles * blocks_n,)](
        x,
        _describe(w_END, config, kind is not None) if config.bulk else w_END,
        scratch.weights_TK,
        out_PN,
        scratch.counts_E,
        scratch.lists_ET,
        bias,
        num_experts,
        n,
        width,
        scratch.capacity,
        ROW_DIVISOR=divisor,
        KIND=-1 if kind is None else KINDS.index(kind),
        WEIGHTED=weighted,
        ACTIVATION=-1 if activation is None else KINDS.index(activation),
        SCALED=scaled,
        CLAMPED=clamp is not None if clamp is None or clamp.offset else 2,
        ALPHA=0.0 if clamp is None else clamp.alpha,
        LIMIT=0.0 if clamp is None else clamp.limit,
        SWAP=config.swap,
        WALK=config.walk,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_E=next_power_of_2(num_experts),
        STAGES=_stages(config, w_END.element_size(), shared_bytes()),
        EVEN_K=width % config.block_k == 0,
        BULK=config.bulk,
        num_warps=config.num_warps,
        **launch_options(),
    )


def launch_combine(
    out_TD: torch.Tensor,
    num_tokens: torch.Tensor,
    scratch: ExpertScratch,
    top_k: int,
    *,
    add: bool,
    ids_TK: torch.Tensor | None = None,
    first: int = 0,
    count: int = 0,
) -> None:
    """Sum each token's pairs into `out`, or onto it; with ids those of `count` experts from the first on."""
    rows, hidden = out_TD.shape
    block_d = min(next_power_of_2(hidden), 1024)
    num_experts = scratch.counts_E.shape[0]
    combine_kernel[(rows, cdiv(hidden, block_d))](
        scratch.out_PD,
        out_TD,
        num_tokens,
        scratch.counts_E,
        ids_TK,
        first,
        count,
        rows,
        num_experts,
        hidden,
        K=top_k,
        ADD=add,
        BLOCK_D=block_d,
        BLOCK_E=next_power_of_2(num_experts),
        num_warps=max(block_d // 256, 1),
        **launch_options(),
    )
