"""Logprobs of drawn tokens, their ranks, and the most likely alternatives, in one pass over the logits and two small ones.

The first pass keeps, of each tile, the sum of exponentials, the number of logits above the drawn token's, and the maxima
of stretches; the alternatives then lie in the stretches with the largest maxima.

Legend: N rows that want logprobs, V vocabulary, M stretches a row, K one more than the alternatives.
"""

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.triton.sampling.heads import (
    HEAD,
    STRETCH,
    TILE,
    key_value,
    num_stretches_of,
    order_key,
    select_heads,
    store_tile_maxima,
)


@triton.jit(do_not_specialize_on_alignment=["tile_sum_ptr"])
def tile_logprobs_kernel(
    logits_ptr,
    index_ptr,
    token_ptr,
    maxima_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    tile_above_ptr,
    vocabulary,
    num_tiles,
    num_stretches,
    stride,
    TILE: tl.constexpr,
    STRETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    number = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    row_ptr = logits_ptr + tl.load(index_ptr + number).to(tl.int64) * stride
    own = tl.load(row_ptr + tl.load(token_ptr + number))
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(row_ptr + at, mask=at < vocabulary, other=float("-inf"))
    largest = store_tile_maxima(x, number, tile, maxima_ptr, num_stretches, TILE, STRETCH)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(tile_max_ptr + tl.program_id(0), largest)
    tl.store(tile_sum_ptr + tl.program_id(0), tl.sum(tl.exp(x - base), 0))
    tl.store(tile_above_ptr + tl.program_id(0), tl.sum((x > own).to(tl.int32), 0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["tile_sum_ptr"])
def pick_logprobs_kernel(
    logits_ptr,
    index_ptr,
    token_ptr,
    heads_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    tile_above_ptr,
    values_ptr,
    ids_ptr,
    ranks_ptr,
    vocabulary,
    num_tiles,
    count,
    stride,
    NORMALIZE: tl.constexpr,
    TILES: tl.constexpr,
    STRETCH: tl.constexpr,
    HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    number = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + tl.load(index_ptr + number).to(tl.int64) * stride
    tiles = tl.arange(0, TILES)
    at_tile = number * num_tiles + tiles
    above = tl.load(tile_above_ptr + at_tile, mask=tiles < num_tiles, other=0)
    tl.store(ranks_ptr + number, tl.sum(above, 0) + 1)
    subtract = 0.0
    if NORMALIZE:
        tile_max = tl.load(tile_max_ptr + at_tile, mask=tiles < num_tiles, other=float("-inf"))
        tile_sum = tl.load(tile_sum_ptr + at_tile, mask=tiles < num_tiles, other=0.0)
        largest = tl.max(tile_max, 0)
        subtract = largest + tl.log(tl.sum(tile_sum * tl.exp(tile_max - largest), 0))
    own = tl.load(token_ptr + number)
    out = number * (count + 1)
    tl.store(values_ptr + out, tl.load(row_ptr + own) - subtract)
    tl.store(ids_ptr + out, own)
    if count > 0:
        stretch = tl.load(heads_ptr + number * HEAD + tl.arange(0, HEAD))
        at = stretch[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
        is_left = (stretch[:, None] >= 0) & (at < vocabulary)
        key = order_key(tl.load(row_ptr + at, mask=is_left, other=float("-inf")))
        place = 0
        while place < count:
            top = tl.max(tl.max(tl.where(is_left, key, -0x80000000), 1), 0)
            token = tl.min(tl.min(tl.where(is_left & (key == top), at, 0x7FFFFFFF), 1), 0)
            place += 1
            tl.store(values_ptr + out + place, key_value(top) - subtract)
            tl.store(ids_ptr + out + place, token)
            is_left = is_left & (at != token)


@kernel("token_logprobs", platform="cuda", priority=10)
def token_logprobs(
    logits_SV: torch.Tensor,
    index_N: torch.Tensor,
    token_ids_N: torch.Tensor,
    normalize: bool,
    values_NK: torch.Tensor,
    ids_NK: torch.Tensor,
    ranks_N: torch.Tensor,
) -> None:
    """As `ops.token_logprobs`; rows of logits may lie apart."""
    number, vocabulary = len(index_N), logits_SV.shape[1]
    if not number:
        return
    device = logits_SV.device
    num_tiles, stretches = cdiv(vocabulary, TILE), num_stretches_of(vocabulary)
    maxima_NM = torch.empty((number, stretches), dtype=torch.float32, device=device)
    tile_max, tile_sum = torch.empty((2, number, num_tiles), dtype=torch.float32, device=device)
    tile_above = torch.empty((number, num_tiles), dtype=torch.int32, device=device)
    stride = logits_SV.stride(0)
    tile_logprobs_kernel[(number * num_tiles,)](
        logits_SV,
        index_N,
        token_ids_N,
        maxima_NM,
        tile_max,
        tile_sum,
        tile_above,
        vocabulary,
        num_tiles,
        stretches,
        stride,
        TILE=TILE,
        STRETCH=STRETCH,
        num_warps=4,
        **launch_options(),
    )
    heads_NH, _ = select_heads(maxima_NM)
    pick_logprobs_kernel[(number,)](
        logits_SV,
        index_N,
        token_ids_N,
        heads_NH,
        tile_max,
        tile_sum,
        tile_above,
        values_NK,
        ids_NK,
        ranks_N,
        vocabulary,
        num_tiles,
        values_NK.shape[1] - 1,
        stride,
        NORMALIZE=normalize,
        TILES=next_power_of_2(num_tiles),
        STRETCH=STRETCH,
        HEAD=HEAD,
        num_warps=8,
        **launch_options(),
    )
