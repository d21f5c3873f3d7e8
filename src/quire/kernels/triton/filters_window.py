"""Rows whose cut lies deeper than their head: a histogram says where about, and the values there are looked at alone.

Bins are equal steps of distance from the largest value. Their counts bound the mass above every bin, from the top and
from the bottom; so the cut is known to lie within a few bins. Those values (or, where a row's mass has to be summed, all
from there up) are gathered into one array, where the cut is found exactly. A row that does not fit stays open.

Legend: S rows, V vocabulary, A parts a row, B bins, C candidates, W four figures of a window.
"""

import torch
import triton

from quire.kernels.triton.filters_solve import solve, weigh
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, launch_options, next_power_of_2, tl
from quire.kernels.triton.sampling_heads import LOWEST_KEY, key_value, order_key

PART = 8192
BINS = 2048
CANDIDATES = 16384
PART_WARPS = 8
REACH = tl.constexpr(24.0)
"""Distance that the bins cover, in units of the temperature (of the logits, where k decides); the last takes the rest."""
SLACK = tl.constexpr(2e-5)
"""Share of the mass by which sums of bins may err."""


@triton.jit
def _bin_of(x, largest, inverse, has_k, BINS: tl.constexpr):
    """Grows as x falls, whatever the rounding: bins are ranges of the order."""
    scale = tl.where(has_k, 1.0, inverse) * (BINS / REACH)
    number = tl.minimum((largest - x) * scale, BINS - 1.0).to(tl.int32)
    return tl.maximum(tl.minimum(number, BINS - 1), 0)


@triton.jit
def histogram_kernel(
    logits_ptr,
    inverse_ptr,
    top_k_ptr,
    largest_ptr,
    is_open_ptr,
    histogram_ptr,
    vocabulary,
    parts,
    stride,
    PART: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(0) // parts).to(tl.int64)
    if tl.load(is_open_ptr + row) != 0:
        top_k = tl.load(top_k_ptr + row)
        has_k = (top_k > 0) & (top_k < vocabulary)
        at = tl.program_id(0) % parts * PART + tl.arange(0, PART)
        inside = at < vocabulary
        x = tl.load(logits_ptr + row * stride + at, mask=inside, other=float("-inf"))
        number = _bin_of(x, tl.load(largest_ptr + row), tl.load(inverse_ptr + row), has_k, BINS)
        counts = tl.histogram(number, BINS, mask=inside)
        tl.store(histogram_ptr + tl.program_id(0).to(tl.int64) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _first_bin(is_it, bins, BINS: tl.constexpr):
    return tl.min(tl.where(is_it, bins, BINS - 1), 0)


@triton.jit
def window_kernel(
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    floor_ptr,
    total_ptr,
    is_open_ptr,
    histogram_ptr,
    window_ptr,
    offset_ptr,
    vocabulary,
    parts,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """window[s] = first and last bin of the candidates, how many values lie above them, how many they are (0: none)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    first = 1
    last = 0
    base = 0
    size = 0
    if tl.load(is_open_ptr + row) != 0:
        inverse = tl.load(inverse_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        has_min_p = tl.load(min_p_ptr + row) > 0.0
        has_k = (top_k > 0) & (top_k < vocabulary)
        largest = tl.load(largest_ptr + row)
        total = tl.load(total_ptr + row)
        bins = tl.arange(0, BINS)
        counts = tl.zeros((BINS,), tl.int32)
        part = 0
        while part < parts:
            counts += tl.load(histogram_ptr + (row * parts + part) * BINS + bins)
            part += 1
        upto = tl.cumsum(counts, 0)
        step = tl.where(has_k, inverse, 1.0) * (REACH / BINS)
        most = counts.to(tl.float32) * tl.exp(-step * bins)
        least = tl.where(bins == BINS - 1, 0.0, counts.to(tl.float32) * tl.exp(-step * (bins + 1)))
        most_upto = tl.cumsum(most, 0)
        least_upto = tl.cumsum(least, 0)
        # The mass up to a bin, from above it and as what the bins below it leave of the total.
        most_upto = tl.minimum(most_upto, total - (tl.sum(least, 0) - least_upto))
        least_upto = tl.maximum(tl.cumsum(least, 0), total - (tl.sum(most, 0) - tl.cumsum(most, 0)))
        needed = top_p * total
        slack = SLACK * total
        earliest = _first_bin(most_upto + slack >= needed, bins, BINS)
        last = _first_bin(least_upto - slack >= needed, bins, BINS)
        floor_bin = _bin_of(tl.load(floor_ptr + row), largest, inverse, has_k, BINS)
        if has_k:
            last = _first_bin(upto >= top_k, bins, BINS)
            if has_min_p:
                last = tl.minimum(last, floor_bin)
        elif has_min_p:
            last = floor_bin
        first = 0
        if tl.sum(tl.where(bins <= last, counts, 0), 0) > CANDIDATES:
            if has_k & (top_p >= 1.0):
                first = last
            elif has_k | has_min_p:
                first = last + 1
            else:
                first = earliest
        base = tl.sum(tl.where(bins < first, counts, 0), 0)
        size = tl.sum(tl.where((bins >= first) & (bins <= last), counts, 0), 0)
        if size > CANDIDATES:
            size = 0
        begin = 0
        part = 0
        while part < parts:
            tl.store(offset_ptr + row * parts + part, begin)
            mine = tl.load(histogram_ptr + (row * parts + part) * BINS + bins)
            begin += tl.sum(tl.where((bins >= first) & (bins <= last), mine, 0), 0)
            part += 1
    tl.store(window_ptr + row * 4, first)
    tl.store(window_ptr + row * 4 + 1, last)
    tl.store(window_ptr + row * 4 + 2, base)
    tl.store(window_ptr + row * 4 + 3, size)


@triton.jit
def gather_candidates_kernel(
    logits_ptr,
    inverse_ptr,
    top_k_ptr,
    largest_ptr,
    window_ptr,
    offset_ptr,
    candidates_ptr,
    base_mass_ptr,
    vocabulary,
    parts,
    stride,
    PART: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The candidates, in the order of the row; of each part, the mass above them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(0) // parts).to(tl.int64)
    if tl.load(window_ptr + row * 4 + 3) > 0:
        first = tl.load(window_ptr + row * 4)
        last = tl.load(window_ptr + row * 4 + 1)
        top_k = tl.load(top_k_ptr + row)
        has_k = (top_k > 0) & (top_k < vocabulary)
        largest = tl.load(largest_ptr + row)
        inverse = tl.load(inverse_ptr + row)
        at = tl.program_id(0) % parts * PART + tl.arange(0, PART)
        inside = at < vocabulary
        x = tl.load(logits_ptr + row * stride + at, mask=inside, other=float("-inf"))
        number = _bin_of(x, largest, inverse, has_k, BINS)
        is_one = inside & (number >= first) & (number <= last)
        place = tl.load(offset_ptr + tl.program_id(0)) + tl.cumsum(is_one.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + row * CANDIDATES + place, x, mask=is_one)
        mass = tl.sum(tl.where(inside & (number < first), weigh(x, largest, inverse), 0.0), 0)
        tl.store(base_mass_ptr + tl.program_id(0), mass)


@triton.jit
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
    base_mass_ptr,
    is_open_ptr,
    threshold_ptr,
    vocabulary,
    parts,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The thresholds of the rows whose cut lies in their window; they are open no more."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    size = tl.load(window_ptr + row * 4 + 3)
    if size > 0:
        inverse = tl.load(inverse_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        has_k = (top_k > 0) & (top_k < vocabulary)
        largest = tl.load(largest_ptr + row)
        floor = tl.load(floor_ptr + row)
        part = tl.arange(0, PARTS)
        base_mass = tl.sum(tl.load(base_mass_ptr + row * parts + part, mask=part < parts, other=0.0), 0)
        place = tl.arange(0, CANDIDATES)
        x = tl.load(candidates_ptr + row * CANDIDATES + place, mask=place < size, other=float("-inf"))
        floor_bin = _bin_of(floor, largest, inverse, has_k, BINS)
        is_open, low = solve(
            x,
            place < size,
            floor_bin <= tl.load(window_ptr + row * 4 + 1),
            tl.maximum(order_key(floor).to(tl.int64), tl.full((), LOWEST_KEY, tl.int64)),
            largest,
            inverse,
            top_k.to(tl.float32),
            tl.load(top_p_ptr + row),
            has_k,
            tl.load(min_p_ptr + row) > 0.0,
            tl.load(window_ptr + row * 4 + 2).to(tl.float32),
            base_mass,
            tl.load(total_ptr + row),
        )
        tl.store(is_open_ptr + row, is_open)
        tl.store(threshold_ptr + row, key_value(low.to(tl.int32)))


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
    device = logits_SV.device
    parts = triton.cdiv(vocabulary, PART)
    histogram = torch.empty((rows, parts, BINS), dtype=torch.int32, device=device)
    window_SW = torch.empty((rows, 4), dtype=torch.int32, device=device)
    offset_SA = torch.empty((rows, parts), dtype=torch.int32, device=device)
    base_mass_SA = torch.empty((rows, parts), dtype=torch.float32, device=device)
    candidates_SC = torch.empty((rows, CANDIDATES), dtype=torch.float32, device=device)
    inverse_S, top_k_S, _, _ = columns
    stride, options = logits_SV.stride(0), launch_options()
    histogram_kernel[(rows * parts,)](
        logits_SV, inverse_S, top_k_S, largest_S, is_open_S, histogram, vocabulary, parts, stride,
        PART=PART, BINS=BINS, num_warps=PART_WARPS, **options,
    )  # fmt: skip
    window_kernel[(rows,)](
        *columns, largest_S, floor_S, total_S, is_open_S, histogram, window_SW, offset_SA, vocabulary, parts,
        BINS=BINS, CANDIDATES=CANDIDATES, num_warps=4, **options,
    )  # fmt: skip
    gather_candidates_kernel[(rows * parts,)](
        logits_SV, inverse_S, top_k_S, largest_S, window_SW, offset_SA, candidates_SC, base_mass_SA, vocabulary, parts,
        stride, PART=PART, BINS=BINS, CANDIDATES=CANDIDATES, num_warps=PART_WARPS, **options,
    )  # fmt: skip
    window_thresholds_kernel[(rows,)](
        *columns, largest_S, floor_S, total_S, window_SW, candidates_SC, base_mass_SA, is_open_S, threshold_S,
        vocabulary, parts, PARTS=next_power_of_2(parts), BINS=BINS, CANDIDATES=CANDIDATES, num_warps=16, **options,
    )  # fmt: skip
