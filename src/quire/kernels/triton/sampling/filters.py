"""Min-p, top-k and top-p as one threshold a row, found without sorting it, and the Gumbel-max draw above it.

What is dropped, and in which order the filters come, is said in `kernels/sampling.py`: each keeps a head of the
descending order, ties at the cut are kept whole. A first pass keeps maxima and sums of weights; a row whose cut lies among its
largest logits (small k, peaked distributions) is done after a look at a few thousand of them; for most others a histogram
finds the few thousand that matter (`filters_window`); what is still open is searched with several pivots a pass. A row's
threshold does not depend on other rows.

Weights are exp((x - largest) * inverse temperature) in float32, summed in an order that depends on the vocabulary's size
alone. A cut at which the mass comes within about 1e-6 of top_p may fall on the next value to either side of where other
arithmetic would put it.

Legend: S rows, V vocabulary, M stretches a row, N tiles a row, H stretches of the head.
"""

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.triton.sampling.draw import launch_draw
from quire.kernels.triton.sampling.filters_solve import is_filtered, solve, weigh
from quire.kernels.triton.sampling.filters_window import solve_open_rows
from quire.kernels.triton.sampling.heads import (
    HEAD,
    LOWEST_KEY,
    STRETCH,
    TILE,
    key_value,
    num_stretches_of,
    order_key,
    select_heads,
    store_tile_maxima,
)

HEAD_WARPS = 8
PIVOTS = 8
SEARCH_BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["tile_sum_ptr"])
def tile_weights_kernel(
    logits_ptr,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    vocabulary,
    num_tiles,
    num_stretches,
    stride,
    TILE: tl.constexpr,
    STRETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each tile of the filtered rows: its maximum, its stretches' maxima, its weights' sum relative to its maximum."""
    await_previous(PDL)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    inverse = tl.load(inverse_ptr + row)
    if is_filtered(inverse, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), vocabulary):
        at = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride + at, mask=at < vocabulary, other=float("-inf"))
        largest = store_tile_maxima(x, row, tile, maxima_ptr, num_stretches, TILE, STRETCH)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(tile_max_ptr + row * num_tiles + tile, largest)
        tl.store(tile_sum_ptr + row * num_tiles + tile, tl.sum(weigh(x, base, inverse), 0))


@triton.jit(do_not_specialize_on_alignment=["tile_sum_ptr", "floor_ptr", "total_ptr"])
def head_thresholds_kernel(
    logits_ptr,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    heads_ptr,
    cut_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    largest_ptr,
    floor_ptr,
    total_ptr,
    is_open_ptr,
    threshold_ptr,
    vocabulary,
    num_tiles,
    stride,
    TILES: tl.constexpr,
    STRETCH: tl.constexpr,
    HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The thresholds of the rows whose cut lies in their head; the others are open. Of each: the largest value, the min-p
    floor and the mass."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverse_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    is_open = 0
    threshold = float("-inf")
    if is_filtered(inverse, top_k, top_p, min_p, vocabulary):
        tiles = tl.arange(0, TILES)
        tile_max = tl.load(tile_max_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
        tile_sum = tl.load(tile_sum_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
        largest = tl.max(tile_max, 0)
        total = tl.sum(tile_sum * weigh(tile_max, largest, inverse), 0)
        # In float64, as the definition is; minus infinity without a min-p.
        distance = tl.log(min_p.to(tl.float64)) / inverse.to(tl.float64)
        floor = (largest.to(tl.float64) + distance).to(tl.float32)
        tl.store(largest_ptr + row, largest)
        tl.store(floor_ptr + row, floor)
        tl.store(total_ptr + row, total)
        floor_key = tl.maximum(order_key(floor), LOWEST_KEY)
        has_k = (top_k > 0) & (top_k < vocabulary)
        if has_k | (top_p < 1.0):
            cut = tl.load(cut_ptr + row)
            number = tl.arange(0, HEAD * STRETCH)
            stretch = tl.load(heads_ptr + row * HEAD + number // STRETCH)
            at = stretch * STRETCH + number % STRETCH
            is_there = (stretch >= 0) & (at < vocabulary)
            x = tl.load(logits_ptr + row * stride + at, mask=is_there, other=float("-inf"))
            is_open, low = solve(
                x,
                is_there & (order_key(x) >= cut),
                floor_key >= cut,
                floor_key,
                largest,
                inverse,
                top_k.to(tl.float32),
                top_p,
                has_k,
                min_p > 0.0,
                0.0,
                0.0,
                total,
            )
            threshold = key_value(low)
        else:
            threshold = floor
    tl.store(is_open_ptr + row, is_open)
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _sums_above(row_ptr, pivots, largest, inverse, vocabulary, BY_COUNT, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """For each pivot, the sum of the weights (the number, where BY_COUNT) of the row's values from its key on."""
    keys = pivots.to(tl.int32)
    sums = tl.zeros((PIVOTS, BLOCK), tl.float32)
    start = 0
    while start < vocabulary:
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocabulary, other=float("-inf"))
        weight = tl.where(BY_COUNT, 1.0, weigh(x, largest, inverse))
        weight = tl.where(at < vocabulary, weight, 0.0)
        sums += tl.where(order_key(x)[None, :] >= keys[:, None], weight[None, :], 0.0)
        start += BLOCK
    return tl.sum(sums, 1)


@triton.jit
def _sum_above(row_ptr, key, largest, inverse, vocabulary, BY_COUNT, BLOCK: tl.constexpr):
    pivots = tl.full((1,), 0, tl.int64) + key
    return tl.sum(_sums_above(row_ptr, pivots, largest, inverse, vocabulary, BY_COUNT, 1, BLOCK), 0)


@triton.jit
def _search_row(
    row_ptr, low, high, needed, largest, inverse, vocabulary, BY_COUNT, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """As `_search_head`, over the whole row: every pass divides what is left by PIVOTS + 1."""
    number = tl.arange(0, PIVOTS)
    # The first pivots are spread over values, not keys: a cut is rarely far below the largest.
    spread = largest - (0.25 + 0.5 * number * (number + 1)) / inverse
    pivots = tl.minimum(tl.maximum(order_key(spread).to(tl.int64), low), high)
    while high - low > 1:
        sums = _sums_above(row_ptr, pivots, largest, inverse, vocabulary, BY_COUNT, PIVOTS, BLOCK)
        reaches = sums >= needed
        low = tl.max(tl.where(reaches, pivots, low), 0)
        high = tl.min(tl.where(reaches, high, pivots), 0)
        high = tl.maximum(high, low + 1)
        pivots = low + 1 + (high - low - 1) * number // PIVOTS
    return low


@triton.jit(do_not_specialize_on_alignment=["floor_ptr"])
def row_thresholds_kernel(
    logits_ptr,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    floor_ptr,
    is_open_ptr,
    threshold_ptr,
    vocabulary,
    stride,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The thresholds of open rows: the cut is searched for in the whole row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_open_ptr + row) != 0:
        inverse = tl.load(inverse_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        row_ptr = logits_ptr + row * stride
        largest = tl.load(largest_ptr + row)
        high = order_key(largest).to(tl.int64) + 1
        lowest = tl.full((), LOWEST_KEY, tl.int64)
        low = tl.maximum(order_key(tl.load(floor_ptr + row)).to(tl.int64), lowest)
        kth = lowest
        has_k = (top_k > 0) & (top_k < vocabulary)
        if has_k:
            needed = top_k.to(tl.float32)
            kth = _search_row(row_ptr, lowest, high, needed, largest, inverse, vocabulary, True, PIVOTS, BLOCK)
        if top_p < 1.0:
            edge = tl.maximum(low, kth + has_k.to(tl.int64))
            total = _sum_above(row_ptr, edge, largest, inverse, vocabulary, False, BLOCK)
            if has_k & (kth >= low):
                # Of the values equal to the k-th only as many as k leaves room for are part of the mass.
                room = top_k.to(tl.float32) - _sum_above(row_ptr, edge, largest, inverse, vocabulary, True, BLOCK)
                total += room * weigh(key_value(kth.to(tl.int32)), largest, inverse)
            low = _search_row(
                row_ptr,
                tl.maximum(low, kth),
                high,
                top_p * total,
                largest,
                inverse,
                vocabulary,
                False,
                PIVOTS,
                BLOCK,
            )
        else:
            low = tl.maximum(low, kth)
        tl.store(threshold_ptr + row, key_value(low.to(tl.int32)))


@triton.jit
def hide_below_kernel(logits_ptr, threshold_ptr, vocabulary, num_tiles, stride, TILE: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    threshold = tl.load(threshold_ptr + row)
    if threshold > float("-inf"):
        at = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride + at, mask=at < vocabulary, other=0.0)
        nothing = tl.full((TILE,), float("-inf"), tl.float32)
        tl.store(logits_ptr + row * stride + at, nothing, mask=(at < vocabulary) & (x < threshold))


@kernel("filtered_gumbel_argmax", platform="cuda", priority=10)
def filtered_gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    threshold_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    """As `ops.filtered_gumbel_argmax`; positions may be int32, and rows may lie apart."""
    rows, vocabulary = logits_SV.shape
    if not rows:
        return
    device = logits_SV.device
    num_tiles, stretches = cdiv(vocabulary, TILE), num_stretches_of(vocabulary)
    maxima_SM = torch.empty((rows, stretches), dtype=torch.float32, device=device)
    tile_max_SN, tile_sum_SN = torch.empty((2, rows, num_tiles), dtype=torch.float32, device=device)
    largest_S, floor_S, total_S = torch.empty((3, rows), dtype=torch.float32, device=device)
    is_open_S = torch.empty(rows, dtype=torch.int32, device=device)
    columns = (inverse_temperature_S, top_k_S, top_p_S, min_p_S)
    stride = logits_SV.stride(0)
    tile_weights_kernel[(rows * num_tiles,)](
        logits_SV,
        *columns,
        maxima_SM,
        tile_max_SN,
        tile_sum_SN,
        vocabulary,
        num_tiles,
        stretches,
        stride,
        TILE=TILE,
        STRETCH=STRETCH,
        num_warps=4,
        **launch_options(),
    )
    heads_SH, cut_S = select_heads(maxima_SM)
    head_thresholds_kernel[(rows,)](
        logits_SV,
        *columns,
        heads_SH,
        cut_S,
        tile_max_SN,
        tile_sum_SN,
        largest_S,
        floor_S,
        total_S,
        is_open_S,
        threshold_S,
        vocabulary,
        num_tiles,
        stride,
        TILES=next_power_of_2(num_tiles),
        STRETCH=STRETCH,
        HEAD=HEAD,
        num_warps=HEAD_WARPS,
        **launch_options(),
    )
    solve_open_rows(logits_SV, columns, largest_S, floor_S, total_S, is_open_S, threshold_S)
    row_thresholds_kernel[(rows,)](
        logits_SV,
        *columns,
        largest_S,
        floor_S,
        is_open_S,
        threshold_S,
        vocabulary,
        stride,
        PIVOTS=PIVOTS,
        BLOCK=SEARCH_BLOCK,
        num_warps=16,
        **launch_options(),
    )
    launch_draw(
        logits_SV, inverse_temperature_S, seed_S, position_S, out_S, is_random=True, filtered=(threshold_S, tile_max_SN)
    )


@kernel("hide_below", platform="cuda", priority=10)
def hide_below(logits_SV: torch.Tensor, threshold_S: torch.Tensor) -> None:
    """As `ops.hide_below`; rows may lie apart."""
    rows, vocabulary = logits_SV.shape
    if rows:
        num_tiles = cdiv(vocabulary, TILE)
        hide_below_kernel[(rows * num_tiles,)](
            logits_SV,
            threshold_S,
            vocabulary,
            num_tiles,
            logits_SV.stride(0),
            TILE=TILE,
            num_warps=4,
            **launch_options(),
        )
