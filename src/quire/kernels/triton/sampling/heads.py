"""Where the largest logits of a row are: the maximum of every stretch, and the stretches with the largest maxima.

The H largest logits lie in the H stretches with the largest maxima (or equal one that does). So one pass over the row
that keeps maxima is enough to find the head of its descending order exactly, in a small part of the row.

Order is that of `order_key`: integers that compare as the floats do, so that a value can be searched for by bisection.

Legend: S rows, V vocabulary, M stretches a row, N tiles a row, H stretches of the head.
"""

import torch
import triton

from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl

STRETCH = 128
TILE = 1024
"""Values of which a first pass keeps one figure; a draw computes one or two tiles exactly."""
HEAD = 64
"""Stretches of a head: 8,192 values, which one program holds in registers."""

SELECT_WARPS = 1

LOWEST_KEY = tl.constexpr(-2139095041)
"""`order_key` of minus infinity."""


@triton.jit
def order_key(x):
    """int32 keys in the order of float32 values; applied to a key's bits again, it gives the value's."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float32 value of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def search(key, is_meant, weight, low, high, needed):
    """The largest key at which the weights of it and all above reach `needed`: one of those meant, in [low, high).

    At `low` they must reach it, at `high` not. Ends when one value is left in between. All keys are int32."""
    inside = is_meant & (key >= low) & (key < high)
    number = tl.sum(inside.to(tl.int32), 0)
    while (number > 1) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        is_above = is_meant & (key >= middle)
        above = tl.sum(tl.where(is_above, weight, 0), 0)
        between = tl.sum((is_above & (key < high)).to(tl.int32), 0)
        if above >= needed:
            low = middle
            number = between
        else:
            high = middle
            number -= between
    return tl.max(tl.where(is_meant & (key < high), key, low), 0)


@triton.jit
def store_tile_maxima(x, row, tile, maxima_ptr, num_stretches, TILE: tl.constexpr, STRETCH: tl.constexpr):
    """Keep the maximum of each of a tile's stretches; gives the tile's."""
    maxima = tl.max(tl.reshape(x, (TILE // STRETCH, STRETCH)), 1)
    stretch = tile * (TILE // STRETCH) + tl.arange(0, TILE // STRETCH)
    tl.store(maxima_ptr + row * num_stretches + stretch, maxima, mask=stretch < num_stretches)
    return tl.max(maxima, 0)


@triton.jit
def select_heads_kernel(
    maxima_ptr,
    heads_ptr,
    cut_ptr,
    num_stretches,
    STRETCHES: tl.constexpr,
    HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """heads[s] = the stretches with the largest maxima (-1 where there are fewer); cut[s] = the key from which on every
    value of the row lies in them."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.arange(0, STRETCHES)
    inside = stretch < num_stretches
    maxima = tl.load(maxima_ptr + row * num_stretches + stretch, mask=inside, other=float("-inf"))
    key = order_key(maxima)
    low = tl.min(tl.where(inside, key, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(inside, key, -0x80000000), 0) + 1
    if num_stretches > HEAD:
        # The largest key that at least HEAD maxima reach.
        low = search(key, inside, inside.to(tl.int32), low, high, HEAD)
    above = inside & (key > low)
    equal = inside & (key == low)
    if num_stretches <= HEAD:
        above = inside
        equal = inside & (stretch < 0)
    num_above = tl.sum(above.to(tl.int32), 0)
    num_equal = tl.sum(equal.to(tl.int32), 0)
    place = tl.where(above, tl.cumsum(above.to(tl.int32), 0), num_above + tl.cumsum(equal.to(tl.int32), 0)) - 1
    tl.store(heads_ptr + row * HEAD + place, stretch, mask=(above | equal) & (place < HEAD))
    rest = tl.arange(0, HEAD)
    tl.store(heads_ptr + row * HEAD + rest, rest * 0 - 1, mask=rest >= num_above + num_equal)
    cut = low
    if num_above + num_equal > HEAD:
        cut = low + 1
    if num_stretches <= HEAD:
        cut = low * 0 + LOWEST_KEY
    tl.store(cut_ptr + row, cut)


def num_stretches_of(vocabulary: int) -> int:
    """Stretches of a row."""
    return cdiv(vocabulary, STRETCH)


def select_heads(maxima_SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(heads int32 [S, H], cuts int32 [S]) from the stretches' maxima; see the kernel."""
    rows, stretches = maxima_SM.shape
    heads_SH = torch.empty((rows, HEAD), dtype=torch.int32, device=maxima_SM.device)
    cut_S = torch.empty(rows, dtype=torch.int32, device=maxima_SM.device)
    select_heads_kernel[(rows,)](
        maxima_SM,
        heads_SH,
        cut_S,
        stretches,
        STRETCHES=next_power_of_2(stretches),
        HEAD=HEAD,
        num_warps=SELECT_WARPS,
        **launch_options(),
    )
    return heads_SH, cut_S
