"""A few rows times a matrix, at the speed at which memory gives the matrix: sums on the ordinary units, no tensor cores.

A program owns a few whole rows of the weight and reads them from memory into registers, the first tile before it waits for
the kernel before it. The norm before the product and the activation or residual after it are done on the way, so that one
launch is one operation.

Legend: T rows of x (a power of two at least their number), N outputs, K inputs.
"""

# ruff: noqa: RUF005 (the compiler knows sums of tuples, not unpacking)

import torch
import triton

from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
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


@triton.jit(do_not_specialize=["num_rows"])
def gemv_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    eps,
    NORMED: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = rms_norm(x) @ w.T + bias; KIND >= 0: act of the first N rows' results times those of the N rows behind
    them; ADD: added to what is in out."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = row < N
    column = tl.arange(0, BLOCK_K // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    w = _load_weight(w_ptr, row, column, inside_N, K, EVEN)
    if KIND >= 0:
        up = _load_weight(w_ptr, row + N, column, inside_N, K, EVEN)
    if NORMED:
        norm = tl.load(norm_ptr + column, mask=column < K, other=0.0)
    await_previous(PDL)
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
            next_w = _load_weight(w_ptr, row, at + BLOCK_K, inside_N, K, False)
            if KIND >= 0:
                next_up = _load_weight(w_ptr, row + N, at + BLOCK_K, inside_N, K, False)
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
    for t in tl.static_range(T):
        y = tl.sum(sums[t], axis=0)
        if NORMED:
            scale = tl.rsqrt(tl.sum(squares[t], axis=0) / K + eps)
            y *= scale
        if HAS_BIAS:
            y += tl.load(bias_ptr + row, mask=inside_N, other=0.0)
        if KIND >= 0:
            other = tl.sum(up_sums[t], axis=0)
            if NORMED:
                other *= scale
            if HAS_BIAS:
                other += tl.load(bias_ptr + N + row, mask=inside_N, other=0.0)
            y = activate(y, KIND) * other
        out = out_ptr + tl.cast(t, tl.int64) * N + row
        inside = inside_N & (t < num_rows)
        if ADD:
            y += residuals[t].to(tl.float32)
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)


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
) -> None:
    """One product. `kind` is an activation's number for a gated pair (the weight has twice out's columns), or -1."""
    rows, n = out_TN.shape
    k = weight.shape[1]
    gemv_kernel[(cdiv(n, block_n),)](
        x_TK,
        weight if norm_K is None else norm_K,
        weight,
        weight if bias is None else bias,
        out_TN,
        rows,
        n,
        k,
        eps,
        NORMED=norm_K is not None,
        ADD=add,
        HAS_BIAS=bias is not None,
        KIND=kind,
        T=next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        VECTOR=16 // weight.element_size(),
        EVEN=n % block_n == 0 and block_k <= k,
        MANY=block_k < k,
        num_warps=num_warps,
        **launch_options(),
    )
