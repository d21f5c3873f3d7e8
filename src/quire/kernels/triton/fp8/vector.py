"""Float8 matrices times one to four rows, at the speed of memory: no matrix units, activations in float32.

A program owns some outputs and walks over all of K; its first weights are on their way before it waits for its input.
RMS norm comes for free: its factor is a number a row, taken from the same pass and applied at the end.

Legend: T rows, N outputs, K inputs.
"""
# ruff: noqa: RUF005  (Triton joins tuples with + alone)

from typing import NamedTuple

import torch
import triton

from quire.kernels.triton.fp8.quantize import kind_number
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.triton.norm.activations import activate
from quire.kernels.types import Fp8Weight

MAX_ROWS = 4


@triton.jit
def _load_tile(w_ptr, row_N, column_GV, K: tl.constexpr, RAGGED: tl.constexpr):
    """A tile [G, N, V] of the weight: a thread owns 16 bytes, which it adds up by itself."""
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
    PDL: tl.constexpr,
):
    """out [T, N] = rms_norm(x) @ w.T + bias; KIND >= 0: gated; ADD: added to what is in out."""
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
    await_previous(PDL, EARLY=True)
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
    """Outputs and inputs of a tile, and warps."""

    block_n: int
    block_k: int
    warps: int


def tile_of(outputs: int, inputs: int, *, gated: bool) -> VectorTile:
    """How a product is cut; measured on one H200 with the matrices of a model of 8 billion parameters."""
    if gated:
        return VectorTile(4, _block_k(inputs, 4096), 4)
    if inputs > 8192:
        return VectorTile(4, _block_k(inputs, 1024), 2)
    return VectorTile(8, _block_k(inputs, 512), 2) if outputs > 5000 else VectorTile(8, _block_k(inputs, 2048), 4)


def _block_k(inputs: int, most: int) -> int:
    """The largest power of two, from 512 to `most`, that divides the inputs; 512 where none does."""
    return next((block for block in (4096, 2048, 1024) if block <= most and inputs % block == 0), 512)


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
    block_n, block_k, warps = tile or tile_of(outputs, inputs, gated=bool(kind))
    vector_kernel[(cdiv(outputs, block_n),)](
        x_TK,
        norm_D,
        weight.data,
        weight.scale,
        weight.bias,
        out,
        rows,
        outputs,
        eps,
        K=inputs,
        KIND=kind_number(kind),
        HAS_NORM=norm_D is not None,
        HAS_BIAS=weight.bias is not None,
        ADD=add,
        ROWS=next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        VECTOR=16,
        num_warps=warps,
        **launch_options(),
    )
