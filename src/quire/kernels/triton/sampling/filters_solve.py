"""The cut of a row among some of its values, held in registers: what the filters' kernels share.

Legend: C candidates, in one dimension.
"""

import triton

from quire.kernels.triton.launch import tl
from quire.kernels.triton.sampling.heads import LOWEST_KEY, key_value, order_key, search


@triton.jit
def is_filtered(inverse, top_k, top_p, min_p, vocabulary):
    """Whether a row drops anything: a greedy one has nothing to draw from."""
    wants = ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0) | (min_p > 0.0)
    return wants & (inverse < float("inf"))


@triton.jit
def weigh(x, largest, inverse):
    """Unnormalised probabilities, 1 for the largest."""
    return tl.exp((x - largest) * inverse)


@triton.jit
def solve(
    x_C,
    is_candidate_C,
    has_floor,
    floor_key,
    largest,
    inverse,
    top_k,
    top_p,
    has_k,
    has_min_p,
    base_count,
    base_mass,
    total,
):
    """(whether the cut lies elsewhere, the key from which on values are kept).

    The candidates are every value of the row between two keys; above them are `base_count` more, of mass `base_mass`.
    `has_floor`: all values from the min-p floor on are among the candidates or above. `total`: the row's whole mass.
    """
    key_C = order_key(x_C)
    one_C = is_candidate_C.to(tl.float32)
    low = floor_key
    lowest = tl.min(tl.where(is_candidate_C, key_C, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(is_candidate_C, key_C, -0x80000000), 0) + 1
    is_open = tl.where(high > lowest, 0, 1)
    kth = tl.full((), LOWEST_KEY, tl.int32)
    binds = has_k
    if has_k:
        reached = base_count + tl.sum(tl.where(key_C >= low, one_C, 0.0), 0)
        if has_floor & (reached < top_k):
            binds = False
        elif base_count + tl.sum(one_C, 0) >= top_k:
            kth = search(key_C, is_candidate_C, one_C, lowest, high, top_k - base_count)
        else:
            is_open = 1
    if (top_p < 1.0) & (is_open == 0):
        weight_C = tl.where(is_candidate_C & (key_C >= low), weigh(x_C, largest, inverse), 0.0)
        if binds:
            is_above_C = key_C > kth
            total = tl.sum(tl.where(is_above_C, weight_C, 0.0), 0)
            if kth >= low:
                # Of the values equal to the k-th only as many as k leaves room for are part of the mass.
                room = top_k - tl.sum(tl.where(is_above_C, one_C, 0.0), 0)
                total += room * weigh(key_value(kth), largest, inverse)
            if base_count > 0:
                is_open = 1
        elif has_min_p:
            total = base_mass + tl.sum(weight_C, 0)
            if not has_floor:
                is_open = 1
        low = tl.maximum(low, kth)
        start = tl.maximum(low, lowest)
        needed = top_p * total - base_mass
        if (needed <= 0.0) & (base_count > 0):
            is_open = 1
        if is_open == 0:
            if tl.sum(tl.where(key_C >= start, weight_C, 0.0), 0) >= needed:
                low = search(key_C, is_candidate_C, weight_C, start, high, needed)
            elif start > low:
                is_open = 1
    return is_open, tl.maximum(low, kth)
