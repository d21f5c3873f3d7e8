"""Float8 matrices times one to four rows, at the speed of memory: no matrix units, activations in float32.

A program owns some outputs and walks over all of K; its first weights are on their way before it waits for its input.
RMS norm comes for free: its factor is a number a row, taken from the same pass and applied at the end.

Legend: T rows, N outputs, K inputs.
"""
# ruff: noqa: RUF005  (Triton joins tuples with + alone)

from typing import Any, NamedTuple

import torch
import triton

from quire.kernels.fp8 import Fp8Weight
from quire.kernels.triton.activations import activate
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, launch_options, next_power_of_2, tl
from quire.kernels.triton.linear_prefetch import LANES, may_prefetch, prefetch_rows
from quire.kernels.triton.quantize import kind_number

MAX_ROWS = 4
VECTOR = 16
"""Weights that a thread loads at once: 16 bytes."""


@triton.jit
def _load_tile(w_ptr, row_N, column_GV, K: tl.constexpr, RAGGED: tl.constexpr):
    """A tile [G, N, V] of the weight: a thread owns V neighbours, which it adds up by itself."""
    pointers = w_ptr + row_N.to(tl.int64)[None, :, None] * K + column_GV[:, None, :]
    if RAGGED:
        w_GNV = tl.load(pointers, mask=(column_GV < K)[:, None, :], other=0.0, eviction_policy="evict_first")
    else:
        w_GNV = tl.load(pointers, eviction_policy="evict_first")
    return w_GNV


@triton.jit(do_not_specialize=["T"])
def vector_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    T,
    N,
    eps,
    K: tl.constexpr,
    KIND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    row = tl.where(inside, n, 0)
    column = tl.arange(0, BLOCK_K // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    ragged: tl.constexpr = K % BLOCK_K != 0
    w = _load_tile(w_ptr, row, column, K, ragged)
    if KIND >= 0:
        up = _load_tile(w_ptr, row + N, column, K, ragged)
        up_scale = tl.load(scale_ptr + N + row)
    scale = tl.load(scale_ptr + row)
    if PDL:
        gdc_launch_dependents()
        if PREFETCH:
            each = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N * LANES) // LANES, N - 1)
            prefetch_rows(w_ptr, each, K, BLOCK_K, K - BLOCK_K)
            if KIND >= 0:
                prefetch_rows(w_ptr, each + N, K, BLOCK_K, K - BLOCK_K)
        gdc_wait()
    sums = ()
    up_sums = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BLOCK_K // VECTOR, BLOCK_N), dtype=tl.float32),)
        up_sums = up_sums + (tl.zeros((BLOCK_K // VECTOR, BLOCK_N), dtype=tl.float32),)
        squares = squares + (tl.zeros((BLOCK_K // VECTOR,), dtype=tl.float32),)
    # Without a loop at run time: float8 values that a loop carries over are taken apart and put together byte by byte.
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + column
        if start + BLOCK_K < K:  # the next tile is asked for before this one is used
            next_w = _load_tile(w_ptr, row, at + BLOCK_K, K, ragged)
            if KIND >= 0:
                next_up = _load_tile(w_ptr, row + N, at + BLOCK_K, K, ragged)
        if HAS_NORM:
            norm = tl.load(norm_ptr + at, mask=at < K, other=0.0)
        new_sums = ()
        new_up_sums = ()
        new_squares = ()
        for t in tl.static_range(ROWS):
            x = tl.load(x_ptr + tl.minimum(t, T - 1) * K + at, mask=at < K, other=0.0).to(tl.float32)
            if HAS_NORM:
                new_squares = new_squares + (squares[t] + tl.sum(x * x, axis=1),)
                x *= norm
            new_sums = new_sums + (sums[t] + tl.sum(w.to(tl.float32) * x[:, None, :], axis=2),)
            if KIND >= 0:
                new_up_sums = new_up_sums + (up_sums[t] + tl.sum(up.to(tl.float32) * x[:, None, :], axis=2),)
        sums = new_sums
        if KIND >= 0:
            up_sums = new_up_sums
        if start + BLOCK_K < K:
            w = next_w
            if KIND >= 0:
                up = next_up
        if HAS_NORM:
            squares = new_squares
    for t in tl.static_range(ROWS):
        y = tl.sum(sums[t], axis=0) * scale
        if HAS_NORM:
            factor = tl.rsqrt(tl.sum(squares[t], axis=0) / K + eps)
            y *= factor
        if HAS_BIAS:
            y += tl.load(bias_ptr + row)
        if KIND >= 0:
            other = tl.sum(up_sums[t], axis=0) * up_scale
            if HAS_NORM:
                other *= factor
            if HAS_BIAS:
                other += tl.load(bias_ptr + N + row)
            y = activate(y, KIND) * other
        out = out_ptr + tl.cast(t, tl.int64) * N + n
        mask = inside & (t < T)
        if ADD:
            y += tl.load(out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


class VectorTile(NamedTuple):
    """Outputs and inputs of a tile, warps, and whether a program asks for the rest of its weights before it waits."""

    block_n: int
    block_k: int
    warps: int
    prefetch: bool = False


def tile_of(rows: int, inputs: int, *, gated: bool) -> VectorTile:
    """How a product is cut."""
    block_k = 1024 if inputs % 1024 == 0 or inputs > 2048 else max(128, min(1024, next_power_of_2(inputs)))
    block_n = 4 if gated or rows > 1 else 8
    return VectorTile(block_n, block_k, 4)


def multiply_vectors(
    x_TK: torch.Tensor,
    weight: Fp8Weight,
    out: torch.Tensor,
    *,
    norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: str = "",
    add: bool = False,
    tile: VectorTile | None = None,
) -> None:
    """out = x @ weight.T (+ bias) of at most four rows: with a norm of rms_norm(x), with a kind gated, with `add` added."""
    rows, inputs = x_TK.shape
    outputs = out.shape[1]
    block_n, block_k, warps, prefetch = tile or tile_of(rows, inputs, gated=bool(kind))
    options: dict[str, Any] = launch_options()
    vector_kernel[(triton.cdiv(outputs, block_n),)](
        x_TK, norm_D, weight.data, weight.scale, weight.bias, out, rows, outputs, eps,
        K=inputs, KIND=kind_number(kind), HAS_NORM=norm_D is not None, HAS_BIAS=weight.bias is not None, ADD=add,
        ROWS=next_power_of_2(rows), BLOCK_N=block_n, BLOCK_K=block_k, VECTOR=VECTOR,
        PREFETCH=prefetch and block_k < inputs and may_prefetch(inputs - block_k, 1), num_warps=warps, **options,
    )  # fmt: skip
