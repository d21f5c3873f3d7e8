"""A few rows times a matrix, at the speed at which memory gives the matrix: sums on the ordinary units, no tensor cores.

A program owns a few whole rows of the weight and reads them from memory into registers, the first tile before it waits for
the kernel before it. The norm before the product and the activation or residual after it are done on the way, so that one
launch is one operation.

So is the update of the rows' adapters. What brings a row down to its adapter's ranks is some more rows of the weight, which the
first programs own; the others wait for them while their own rows are on their way, or at their end if they have long rows.

Legend: T rows of x (a power of two at least their number), N outputs, K inputs, R ranks.
"""

# ruff: noqa: RUF005 (the compiler knows sums of tuples, not unpacking)

import torch
import triton

from quire.kernels.adapters import Update
from quire.kernels.triton.adapters import field_of, numbers_of
from quire.kernels.triton.launch import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    is_nvidia,
    launch_options,
    next_power_of_2,
    tl,
)
from quire.kernels.triton.norm.activations import activate


@triton.jit
def _load_weight(w_ptr, row_N, column_GV, inside_N, K, EVEN: tl.constexpr):
    """A tile [G, N, V] of the weight; zero outside."""
    pointers = w_ptr + row_N.to(tl.int64)[None, :, None] * K + column_GV[:, None, :]
    if EVEN:
        w_GNV = tl.load(pointers, eviction_policy="evict_first")
    else:
        inside = inside_N[None, :, None] & (column_GV < K)[:, None, :]
        w_GNV = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return w_GNV


@triton.jit
def _wait(arrivals_ptr, count):
    """Until so many programs have left their sums. To acquire them would empty the L1 cache, in which programs find the rows that
    others have read; nobody reads sums earlier, so that they cannot be there."""
    while tl.atomic_add(arrivals_ptr, 0, sem="relaxed", scope="gpu") < count:
        pass


@triton.jit
def _load_up(tables, t, row, inside_N, width, DTYPE: tl.constexpr, RANKS: tl.constexpr):
    """[R, N] of a row's adapter, for some of so many outputs; and where its sums are among the row's, or -1 for none."""
    slots_ptr, entries_ptr, segment_ptr, num_slots = tables
    slot, r = tl.load(slots_ptr + t), tl.arange(0, RANKS)[:, None]
    rank = field_of(entries_ptr, 2, slot, num_slots).to(tl.int32)
    segment_N = tl.load(segment_ptr + row, mask=inside_N, other=0).to(tl.int32)
    is_updated_N = inside_N & (((field_of(entries_ptr, 3, slot, num_slots).to(tl.int32) >> segment_N) & 1) == 1)
    inside_RN = (r < rank) & is_updated_N[None, :]
    up_ptr = numbers_of(entries_ptr, 1, slot, num_slots, DTYPE)
    up_RN = tl.load(up_ptr + r.to(tl.int64) * width + row[None, :], mask=inside_RN, other=0.0)
    return up_RN, tl.where(inside_RN, (segment_N * rank)[None, :] + r, -1)


@triton.jit
def _expand(up, h_ptr):
    """[N]: what a row's adapter adds."""
    up_RN, place_RN = up
    return tl.sum(up_RN.to(tl.float32) * tl.load(h_ptr + place_RN, mask=place_RN >= 0, other=0.0), axis=0)


@triton.jit(do_not_specialize=["num_rows", "num_shrinks", "num_slots"])
def gemv_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    slots_ptr,
    entries_ptr,
    segment_ptr,
    h_ptr,
    arrivals_ptr,
    num_rows,
    N,
    K,
    eps,
    num_shrinks,
    num_slots,
    num_segments,
    h_width,
    NORMED: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = rms_norm(x) @ w.T + bias; KIND >= 0: act of the first N rows' results times those of the N rows behind
    them; ADD: added to what is in out; RANKS > 0: the rows' adapters have at most so many."""
    program, half = tl.program_id(0), N
    row = program * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = row < N
    known_N = inside_N  # of the weight
    if RANKS > 0:
        is_shrink, mine, num_lines = program < num_shrinks, program % num_rows, tl.cast(0, tl.int32)
        if is_shrink:
            slot = tl.load(slots_ptr + mine)
            num_lines = field_of(entries_ptr, 2, slot, num_slots).to(tl.int32) * num_segments
            if num_lines > 0:
                w_ptr = numbers_of(entries_ptr, 0, slot, num_slots, w_ptr.dtype.element_ty)
            program, half = program // num_rows, 0
        else:
            program -= num_shrinks
        line = program * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.where(is_shrink, tl.minimum(line, tl.maximum(num_lines, 1) - 1), line)
        inside_N, known_N = (row < N) & ~is_shrink, (row < N) | is_shrink
        w_ptr = tl.multiple_of(w_ptr, 16)
    column = tl.arange(0, BLOCK_K // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    w = _load_weight(w_ptr, row, column, known_N, K, EVEN)
    if KIND >= 0:
        up = _load_weight(w_ptr, row + half, column, known_N, K, EVEN)
    if NORMED:
        norm = tl.load(norm_ptr + column, mask=column < K, other=0.0)
    ups = ()
    other_ups = ()
    if RANKS > 0:
        tables, width = (slots_ptr, entries_ptr, segment_ptr, num_slots), 2 * N if KIND >= 0 else N
        for t in tl.static_range(T):
            x_row = tl.minimum(t, num_rows - 1)
            ups = ups + (_load_up(tables, x_row, row, inside_N, width, w_ptr.dtype.element_ty, RANKS),)
            if KIND >= 0:
                other_ups = other_ups + (
                    _load_up(tables, x_row, row + N, inside_N, width, w_ptr.dtype.element_ty, RANKS),
                )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if RANKS > 0 and not MANY:
        _wait(arrivals_ptr, tl.where(is_shrink, 0, num_shrinks))
    residuals = ()
    if ADD:
        for t in tl.static_range(T):
            residual = tl.load(out_ptr + tl.cast(t, tl.int64) * N + row, mask=inside_N & (t < num_rows), other=0.0)
            residuals = residuals + (residual,)
    sums = ()
    up_sums = ()
    squares = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros((BLOCK_K // VECTOR, BLOCK_N), dtype=tl.float32),)
        up_sums = up_sums + (tl.zeros((BLOCK_K // VECTOR, BLOCK_N), dtype=tl.float32),)
        squares = squares + (tl.zeros((BLOCK_K // VECTOR,), dtype=tl.float32),)
    end = K if MANY else BLOCK_K
    for start in range(0, end, BLOCK_K):
        at = start + column
        if MANY:  # the next tile is on its way while this one is added up; behind the last column nothing is read
            next_w = _load_weight(w_ptr, row, at + BLOCK_K, known_N, K, False)
            if KIND >= 0:
                next_up = _load_weight(w_ptr, row + half, at + BLOCK_K, known_N, K, False)
        new_sums = ()
        new_up_sums = ()
        new_squares = ()
        for t in tl.static_range(T):
            x = tl.load(x_ptr + tl.minimum(t, num_rows - 1) * K + at, mask=at < K, other=0.0).to(tl.float32)
            if NORMED:
                new_squares = new_squares + (squares[t] + tl.sum(x * x, axis=1),)
                x *= norm
            new_sums = new_sums + (sums[t] + tl.sum(w.to(tl.float32) * x[:, None, :], axis=2),)
            if KIND >= 0:
                new_up_sums = new_up_sums + (up_sums[t] + tl.sum(up.to(tl.float32) * x[:, None, :], axis=2),)
        sums = new_sums
        if KIND >= 0:
            up_sums = new_up_sums
        if NORMED:
            squares = new_squares
        if MANY:
            w = next_w
            if KIND >= 0:
                up = next_up
            if NORMED:
                norm = tl.load(norm_ptr + at + BLOCK_K, mask=at + BLOCK_K < K, other=0.0)
    if RANKS > 0 and MANY:
        _wait(arrivals_ptr, tl.where(is_shrink, 0, num_shrinks))
    for t in tl.static_range(T):
        y = tl.sum(sums[t], axis=0)
        if NORMED:
            scale = tl.rsqrt(tl.sum(squares[t], axis=0) / K + eps)
            y *= scale
        if RANKS > 0:
            tl.store(h_ptr + t * h_width + line, y, mask=(line < num_lines) & (t == mine))
            y += _expand(ups[t], h_ptr + t * h_width)
        if HAS_BIAS:
            y += tl.load(bias_ptr + row, mask=inside_N, other=0.0)
        if KIND >= 0:
            other = tl.sum(up_sums[t], axis=0)
            if NORMED:
                other *= scale
            if RANKS > 0:
                other += _expand(other_ups[t], h_ptr + t * h_width)
            if HAS_BIAS:
                other += tl.load(bias_ptr + N + row, mask=inside_N, other=0.0)
            y = activate(y, KIND) * other
        out = out_ptr + tl.cast(t, tl.int64) * N + row
        inside = inside_N & (t < num_rows)
        if ADD:
            y += residuals[t].to(tl.float32)
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)
    if RANKS > 0:  # noqa: SIM102 (one is known to the compiler, one is not)
        if is_shrink:
            tl.debug_barrier()
            tl.atomic_add(arrivals_ptr, 1, sem="release", scope="gpu")


def launch_gemv(
    x_TK: torch.Tensor,
    norm_K: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_TN: torch.Tensor,
    *,
    kind: int = -1,
    add: bool = False,
    block_n: int,
    block_k: int,
    num_warps: int,
    update: Update | None = None,
) -> None:
    """One product. `kind` is an activation's number for a gated pair (the weight has twice out's columns), or -1."""
    rows, n = out_TN.shape
    k = weight.shape[1]
    memory, numbers, ranks, options = (weight,) * 5, (0, 0, 1, 1), 0, launch_options()
    if update is not None:
        table, room_PTH, ranks = update.table, update.room_PTH, max(16, next_power_of_2(update.table.most_ranks))
        memory = (update.rows.slots_T, table.entries_FL, table.segment_N, room_PTH, update.arrivals)
        num_shrinks = rows * cdiv(table.num_segments * table.most_ranks, block_n)
        numbers = (num_shrinks, table.entries_FL.shape[1], table.num_segments, room_PTH.shape[2])
        if is_nvidia():  # as many programs at a time as without adapters
            options = options | {"maxnreg": 128 if rows > 1 else 64 if kind < 0 else 80}
    gemv_kernel[(numbers[0] + cdiv(n, block_n),)](
        x_TK,
        weight if norm_K is None else norm_K,
        weight,
        weight if bias is None else bias,
        out_TN,
        *memory,
        rows,
        n,
        k,
        eps,
        *numbers,
        NORMED=norm_K is not None,
        ADD=add,
        HAS_BIAS=bias is not None,
        KIND=kind,
        RANKS=ranks,
        T=next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        VECTOR=16 // weight.element_size(),
        EVEN=n % block_n == 0 and block_k <= k,
        MANY=block_k < k,
        num_warps=num_warps,
        **options,
    )
