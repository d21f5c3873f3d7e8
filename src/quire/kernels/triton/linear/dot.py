"""Tens to hundreds of rows times a matrix, on the tensor cores: still bound by reading the matrix, so it is read once.

A program owns a block of outputs for a block of rows and walks along the inputs, a few tiles in flight. The norm before the
product and the activation or residual after it are done on the way. What the norm divides by is known only when the row has
been read, so the result is divided, not the input. With SPLIT > 1 several programs share a block's inputs; the last to
finish adds their parts in order, so that the sum does not depend on who was last.

Legend: T rows of x, N outputs, K inputs.
"""

import torch
import triton

from quire.kernels.triton.launch import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    launch_options,
    per_queue,
    tl,
)
from quire.kernels.triton.norm.activations import activate

PARTIAL_VALUES, COUNTERS = 8 << 20, 4096


@triton.jit
def weight_row(block_n, n, N, KIND: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weight's row behind a block's n-th: gate and up by turns in a gated pair; the last again instead of one outside."""
    if KIND >= 0:
        row = tl.minimum(block_n * (BLOCK_N // 2) + n // 2, N - 1) + (n % 2) * N
    else:
        row = tl.minimum(block_n * BLOCK_N + n, N - 1)
    return row


@triton.jit(do_not_specialize=["num_rows"])
def dot_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    N,
    K,
    eps,
    NORMED: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    PRESCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `gemv_kernel`; for a gated pair a program's BLOCK_N rows are gate and up by turns."""
    block_n, block_t, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.arange(0, BLOCK_N)
    row = weight_row(block_n, n, N, KIND, BLOCK_N)
    t = block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    x_rows = x_ptr + tl.minimum(t, num_rows - 1).to(tl.int64) * K
    w_rows = w_ptr + row.to(tl.int64)[:, None] * K
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    first = part * length
    last = tl.minimum(first + length, K)
    column = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # The weight is the dot's left operand: its left side is at least 64 long on tensor cores, where its right side may be 8.
    x_rows = tl.expand_dims(x_rows, 0)
    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K, BLOCK_T), dtype=tl.float32)
    if PRESCALE:
        for start in range(0, K, BLOCK_K):
            at = tl.expand_dims(start + column, 1)
            x = tl.load(x_rows + at, mask=at < K, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.expand_dims(tl.rsqrt(tl.sum(squares, axis=0) / K + eps), 0)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        at = (start + column)[None, :]
        x_at = tl.expand_dims(start + column, 1)
        if EVEN_K:
            w = tl.load(w_rows + at, eviction_policy="evict_first")
        else:
            w = tl.load(w_rows + at, mask=at < K, other=0.0, eviction_policy="evict_first")
        if EVEN_K:
            x = tl.load(x_rows + x_at)
        else:
            x = tl.load(x_rows + x_at, mask=x_at < K, other=0.0)
        if NORMED:
            wide = x.to(tl.float32)
            if PRESCALE:
                wide *= scale
            else:
                squares += wide * wide
            if EVEN_K:
                norm = tl.load(norm_ptr + x_at)
            else:
                norm = tl.load(norm_ptr + x_at, mask=x_at < K, other=0.0)
            x = (wide * norm).to(w.dtype)
        else:
            x = x.to(w.dtype)
        sums = tl.dot(w, x, sums, input_precision="ieee")
    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_T * BLOCK_N
        tile = block_t * tl.num_programs(0) + block_n
        inner = n[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        mine = partial_ptr + (tile * SPLIT).to(tl.int64) * SIZE + inner
        tl.store(mine + part * SIZE, sums)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            sums = tl.load(mine, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                sums += tl.load(mine + other * SIZE, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
            _finish(
                sums,
                squares,
                bias_ptr,
                out_ptr,
                row,
                t,
                block_n,
                num_rows,
                N,
                K,
                eps,
                False,
                ADD,
                HAS_BIAS,
                KIND,
                BLOCK_T,
                BLOCK_N,
            )
    else:
        _finish(
            sums,
            squares,
            bias_ptr,
            out_ptr,
            row,
            t,
            block_n,
            num_rows,
            N,
            K,
            eps,
            NORMED and not PRESCALE,
            ADD,
            HAS_BIAS,
            KIND,
            BLOCK_T,
            BLOCK_N,
        )


@triton.jit
def _finish(
    sums,
    squares,
    bias_ptr,
    out_ptr,
    row,
    t,
    block_n,
    num_rows,
    N,
    K,
    eps,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Norm's divisor, bias, activation, residual, and out to memory."""
    y = tl.trans(sums)
    if SCALED:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row)[None, :]
    if KIND >= 0:
        gate, up = tl.split(tl.reshape(y, (BLOCK_T, BLOCK_N // 2, 2)))
        y = activate(gate, KIND) * up
        column = block_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    out = out_ptr + t.to(tl.int64)[:, None] * N + column[None, :]
    inside = (t < num_rows)[:, None] & (column < N)[None, :]
    if ADD:
        y += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)


@per_queue
def split_workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums, and counters that are zero between launches. Made when weights are loaded: never while recording."""
    values = 1 << 16 if interpreted() else PARTIAL_VALUES
    return (
        torch.empty(values, dtype=torch.float32, device=device),
        torch.zeros(COUNTERS, dtype=torch.int32, device=device),
    )


def launch_dot(
    x_TK: torch.Tensor,
    norm_K: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_TN: torch.Tensor,
    *,
    kind: int = -1,
    add: bool = False,
    block_t: int,
    block_n: int,
    block_k: int,
    split: int = 1,
    stages: int,
    num_warps: int,
) -> None:
    """One product. `kind` is an activation's number for a gated pair (the weight has twice out's columns), or -1."""
    rows, n = out_TN.shape
    k = weight.shape[1]
    blocks = cdiv(n, block_n // 2 if kind >= 0 else block_n), cdiv(rows, block_t)
    if norm_K is not None:
        split = 1
    partial, counter = split_workspace(x_TK.device)
    if blocks[0] * blocks[1] > COUNTERS or blocks[0] * blocks[1] * split * block_n * block_t > partial.numel():
        split = 1
    dot_kernel[(*blocks, split)](
        x_TK,
        weight if norm_K is None else norm_K,
        weight,
        weight if bias is None else bias,
        out_TN,
        partial,
        counter,
        rows,
        n,
        k,
        eps,
        NORMED=norm_K is not None,
        ADD=add,
        HAS_BIAS=bias is not None,
        KIND=kind,
        PRESCALE=norm_K is not None and torch.float16 in (x_TK.dtype, weight.dtype),
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLIT=split,
        STAGES=stages,
        EVEN_K=k % block_k == 0,
        num_warps=num_warps,
        **launch_options(),
    )
