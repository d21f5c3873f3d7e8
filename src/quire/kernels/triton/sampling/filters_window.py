"""Rows whose cut lies deeper than their head: a sample says where about, and the values there are looked at alone.

A few thousand values, spread over the row, tell within a few percent where its cut lies. The values around it (or all from
the lower bound up, where they are few) are gathered together with the mass above them, and the cut is found exactly among
them. A row whose sample misled, or whose values do not fit, stays open.

Legend: S rows, V vocabulary, A parts a row, C candidates, W three figures of a window.
"""

import torch
import triton

from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.triton.sampling.filters_solve import solve, weigh
from quire.kernels.triton.sampling.heads import LOWEST_KEY, key_value, order_key, search

SAMPLE = 4096
"""Values of a sample; twice as many where the vocabulary is so large that its window would not fit the candidates."""
RUN = 64
"""Neighbours that are sampled together: two lines of memory."""
PART = 4096
PART_WARPS = 8
REGION = 1024
"""Candidates that a part may have."""
CANDIDATES = 16384
MARGIN = 180
"""Sampled values that the window holds to either side of the estimated cut, about three of its standard deviations."""
FULL = tl.constexpr(0.85)
"""Share of the candidates' room that an estimated number may take."""


@triton.jit
def _key_of_rank(key, rank, lowest, highest, SAMPLE: tl.constexpr):
    """The rank-th largest of the sample, from 1; minus infinity's beyond its end."""
    result = tl.full((), LOWEST_KEY, tl.int32)
    if rank < SAMPLE:
        result = search(key, key >= lowest, tl.full((SAMPLE,), 1, tl.int32), lowest, highest, rank)
    return result


@triton.jit(do_not_specialize_on_alignment=["floor_ptr", "total_ptr"])
def window_kernel(
    logits_ptr,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    floor_ptr,
    total_ptr,
    is_open_ptr,
    window_ptr,
    vocabulary,
    stride,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MARGIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """window[s] = whether there is one; its candidates' lowest key; the key from which on values lie above them."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    has_window = 0
    if tl.load(is_open_ptr + row) != 0:
        inverse = tl.load(inverse_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        has_min_p = tl.load(min_p_ptr + row) > 0.0
        has_k = (top_k > 0) & (top_k < vocabulary)
        number = tl.arange(0, SAMPLE)
        at = number // RUN * (vocabulary // (SAMPLE // RUN)) + number % RUN
        x = tl.load(logits_ptr + row * stride + at)
        key = order_key(x)
        lowest = tl.min(key, 0)
        highest = tl.max(key, 0) + 1
        share = SAMPLE / vocabulary.to(tl.float32)
        low_key = tl.maximum(order_key(tl.load(floor_ptr + row)), LOWEST_KEY)
        high_key = tl.full((), 0x7FFFFFFF, tl.int32)
        if has_min_p & (has_k == 0):
            # The mass is that from the floor on.
            rank = tl.sum((key >= low_key).to(tl.int32), 0)
            has_window = (rank < FULL * CANDIDATES * share).to(tl.int32)
        else:
            if has_k:
                rank = (top_k * share).to(tl.int32) + 1
            else:
                weight = weigh(x, tl.load(largest_ptr + row), inverse)
                total = tl.load(total_ptr + row) * share
                # The smaller of the two masses, above and below the cut, is the better known.
                needed = tl.where(top_p > 0.5, tl.sum(weight, 0) - (1.0 - top_p) * total, top_p * total)
                rank = SAMPLE + 0 * top_k
                if tl.sum(weight, 0) >= needed:
                    rank = tl.full((), 0, tl.int32)
                    if needed > 0.0:
                        cut = search(key, key >= lowest, weight, lowest, highest, needed)
                        rank = tl.sum((key >= cut).to(tl.int32), 0)
            few = rank + 4 * tl.sqrt(rank.to(tl.float32)).to(tl.int32) + 16
            is_whole = few < FULL * CANDIDATES * share
            if is_whole:
                has_window = 1
                low_key = _key_of_rank(key, few, lowest, highest, SAMPLE)
            elif (top_p >= 1.0) | (has_k == 0):
                has_window = 1
                low_key = _key_of_rank(key, rank + MARGIN, lowest, highest, SAMPLE)
                high_key = _key_of_rank(key, rank - MARGIN, lowest, highest, SAMPLE)
        tl.store(window_ptr + row * 3 + 1, low_key)
        tl.store(window_ptr + row * 3 + 2, high_key)
    tl.store(window_ptr + row * 3, has_window)


@triton.jit(do_not_specialize_on_alignment=["base_mass_ptr"])
def gather_candidates_kernel(
    logits_ptr,
    inverse_ptr,
    largest_ptr,
    window_ptr,
    candidates_ptr,
    size_ptr,
    base_count_ptr,
    base_mass_ptr,
    vocabulary,
    parts,
    stride,
    PART: tl.constexpr,
    REGION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each part's candidates, in the order of the row, and how many values of what mass lie above them."""
    await_previous(PDL)
    row = (tl.program_id(0) // parts).to(tl.int64)
    if tl.load(window_ptr + row * 3) != 0:
        low_key = tl.load(window_ptr + row * 3 + 1)
        high_key = tl.load(window_ptr + row * 3 + 2)
        at = tl.program_id(0) % parts * PART + tl.arange(0, PART)
        inside = at < vocabulary
        x = tl.load(logits_ptr + row * stride + at, mask=inside, other=float("-inf"))
        key = order_key(x)
        is_one = (inside & (key >= low_key) & (key < high_key)).to(tl.int32)
        place = tl.cumsum(is_one, 0) - 1
        region = candidates_ptr + tl.program_id(0).to(tl.int64) * REGION
        tl.store(region + place, x, mask=(is_one != 0) & (place < REGION))
        tl.store(size_ptr + tl.program_id(0), tl.sum(is_one, 0))
        is_above = inside & (key >= high_key)
        tl.store(base_count_ptr + tl.program_id(0), tl.sum(is_above.to(tl.float32), 0))
        mass = tl.where(is_above, weigh(x, tl.load(largest_ptr + row), tl.load(inverse_ptr + row)), 0.0)
        tl.store(base_mass_ptr + tl.program_id(0), tl.sum(mass, 0))


@triton.jit(do_not_specialize_on_alignment=["floor_ptr", "total_ptr", "base_mass_ptr"])
def window_thresholds_kernel(
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    floor_ptr,
    total_ptr,
    window_ptr,
    candidates_ptr,
    size_ptr,
    base_count_ptr,
    base_mass_ptr,
    is_open_ptr,
    threshold_ptr,
    vocabulary,
    parts,
    PARTS: tl.constexpr,
    REGION: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The thresholds of the rows whose cut lies in their window; they are open no more."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(window_ptr + row * 3) != 0:
        part = tl.arange(0, PARTS)
        sizes = tl.load(size_ptr + row * parts + part, mask=part < parts, other=0)
        size = tl.sum(sizes, 0)
        if (size > 0) & (size <= CANDIDATES) & (tl.max(sizes, 0) <= REGION):
            base_count = tl.sum(tl.load(base_count_ptr + row * parts + part, mask=part < parts, other=0.0), 0)
            base_mass = tl.sum(tl.load(base_mass_ptr + row * parts + part, mask=part < parts, other=0.0), 0)
            place = tl.arange(0, CANDIDATES)
            shift = tl.zeros((CANDIDATES,), tl.int32)
            begin = 0
            number = 0
            while number < parts:
                shift = tl.where(place >= begin, number * REGION - begin, shift)
                begin += tl.load(size_ptr + row * parts + number)
                number += 1
            at = candidates_ptr + row * parts * REGION + place + shift
            x = tl.load(at, mask=place < size, other=float("-inf"))
            top_k = tl.load(top_k_ptr + row)
            floor_key = tl.maximum(order_key(tl.load(floor_ptr + row)), LOWEST_KEY)
            is_open, low = solve(
                x,
                place < size,
                floor_key >= tl.load(window_ptr + row * 3 + 1),
                floor_key,
                tl.load(largest_ptr + row),
                tl.load(inverse_ptr + row),
                top_k.to(tl.float32),
                tl.load(top_p_ptr + row),
                (top_k > 0) & (top_k < vocabulary),
                tl.load(min_p_ptr + row) > 0.0,
                base_count,
                base_mass,
                tl.load(total_ptr + row),
            )
            tl.store(is_open_ptr + row, is_open)
            tl.store(threshold_ptr + row, key_value(low))


def solve_open_rows(
    logits_SV: torch.Tensor,
    columns: tuple[torch.Tensor, ...],
    largest_S: torch.Tensor,
    floor_S: torch.Tensor,
    total_S: torch.Tensor,
    is_open_S: torch.Tensor,
    threshold_S: torch.Tensor,
) -> None:
    """Thresholds of open rows, as far as their candidates fit; `is_open` of these is cleared.

    Args:
        columns: inverse temperature, top-k, top-p, min-p.
    """
    rows, vocabulary = logits_SV.shape
    if vocabulary < SAMPLE:
        return
    device = logits_SV.device
    sample = SAMPLE if 2 * MARGIN * vocabulary <= CANDIDATES * SAMPLE else 2 * SAMPLE
    parts = cdiv(vocabulary, PART)
    window_SW = torch.empty((rows, 3), dtype=torch.int32, device=device)
    candidates = torch.empty((rows, parts, REGION), dtype=torch.float32, device=device)
    size_SA = torch.empty((rows, parts), dtype=torch.int32, device=device)
    base_2SA = torch.empty((2, rows, parts), dtype=torch.float32, device=device)
    inverse_S = columns[0]
    stride, options = logits_SV.stride(0), launch_options()
    window_kernel[(rows,)](
        logits_SV,
        *columns,
        largest_S,
        floor_S,
        total_S,
        is_open_S,
        window_SW,
        vocabulary,
        stride,
        SAMPLE=sample,
        RUN=RUN,
        CANDIDATES=CANDIDATES,
        MARGIN=MARGIN,
        num_warps=sample // 1024,
        **options,
    )
    gather_candidates_kernel[(rows * parts,)](
        logits_SV,
        inverse_S,
        largest_S,
        window_SW,
        candidates,
        size_SA,
        *base_2SA,
        vocabulary,
        parts,
        stride,
        PART=PART,
        REGION=REGION,
        num_warps=PART_WARPS,
        **options,
    )
    window_thresholds_kernel[(rows,)](
        *columns,
        largest_S,
        floor_S,
        total_S,
        window_SW,
        candidates,
        size_SA,
        *base_2SA,
        is_open_S,
        threshold_S,
        vocabulary,
        parts,
        PARTS=next_power_of_2(parts),
        REGION=REGION,
        CANDIDATES=CANDIDATES,
        num_warps=16,
        **options,
    )
