"""Float8 matrices times a few rows (up to some hundred), on the matrix units.

The weights are the left factor, so that their many rows fill the units' long side and tokens the short one:
out.T = W @ x.T. Tokens come in float8 with a scale each. Where there are fewer tiles than the device has room for, sums over
K are split: whoever comes last adds the parts up, always in the same order.

Legend: T rows (tokens), N outputs, K inputs.
"""

from typing import Any, NamedTuple

import torch
import triton

from quire.kernels.triton.fp8.quantize import kind_number
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.triton.linear.dot import weight_row
from quire.kernels.triton.norm.activations import activate
from quire.kernels.types import Fp8Scratch, Fp8Weight


class Tile(NamedTuple):
    """How a product is cut: outputs, inputs and tokens of a tile, parts of K, warps, loads in flight."""

    block_n: int
    block_k: int
    block_t: int
    split: int
    warps: int
    stages: int


@triton.jit
def _finish(
    acc,
    x_scale_ptr,
    pid_n,
    t,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    T,
    N,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Scales, bias, gate or residual; `acc` is [BLOCK_N, BLOCK_T]."""
    acc = acc * tl.load(x_scale_ptr + tl.minimum(t, T - 1))[None, :]
    if KIND < 0:
        n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.minimum(n, N - 1)
        acc = acc * tl.load(w_scale_ptr + row)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + row)[:, None]
    else:
        half: tl.constexpr = BLOCK_N // 2
        n = pid_n * half + tl.arange(0, half)
        row = tl.minimum(n, N - 1)
        gate, up = tl.split(tl.permute(tl.reshape(acc, [half, 2, BLOCK_T]), [0, 2, 1]))
        gate = gate * tl.load(w_scale_ptr + row)[:, None]
        up = up * tl.load(w_scale_ptr + N + row)[:, None]
        if HAS_BIAS:
            gate += tl.load(bias_ptr + row)[:, None]
            up += tl.load(bias_ptr + N + row)[:, None]
        acc = activate(gate, KIND) * up
    y = tl.trans(acc)
    out = out_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
    mask = (t < T)[:, None] & (n < N)[None, :]
    if ADD:
        y += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _rows_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    T,
    N,
    K: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pid_n, pid_t, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r = tl.arange(0, BLOCK_N)
    row = weight_row(pid_n, r, N, KIND, BLOCK_N)
    t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = t < T  # rows of padding are not read: a line that all programs read many times over is slow
    token = tl.minimum(t, T - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    steps_a_part: tl.constexpr = (steps + SPLIT - 1) // SPLIT
    ragged: tl.constexpr = K % BLOCK_K != 0
    begin = part * steps_a_part
    end = tl.minimum(begin + steps_a_part, steps)
    w_base = w_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    x_base = x_ptr + token[None, :] * K + k[:, None]
    await_previous(PDL, EARLY=True)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        start = step * BLOCK_K
        if ragged:
            inside = start + k < K
            w = tl.load(w_base + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_base + start, mask=inside[:, None] & is_token[None, :], other=0.0)
        else:
            w = tl.load(w_base + start)
            x = tl.load(x_base + start, mask=is_token[None, :], other=0.0)
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=BLOCK_K)
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        index = pid_t * tiles + pid_n
        within = r[:, None] + tl.arange(0, BLOCK_T)[None, :] * BLOCK_N
        tl.store(partial_ptr + (index * SPLIT + part) * (BLOCK_N * BLOCK_T) + within, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + index, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for other in tl.static_range(SPLIT):
                acc += tl.load(
                    partial_ptr + (index * SPLIT + other) * (BLOCK_N * BLOCK_T) + within, cache_modifier=".cg"
                )
            tl.store(counters_ptr + index, 0)
            _finish(
                acc, x_scale_ptr, pid_n, t, w_scale_ptr, bias_ptr, out_ptr, T, N, KIND, HAS_BIAS, ADD, BLOCK_N, BLOCK_T
            )
    else:
        _finish(acc, x_scale_ptr, pid_n, t, w_scale_ptr, bias_ptr, out_ptr, T, N, KIND, HAS_BIAS, ADD, BLOCK_N, BLOCK_T)


def fitting_split(split: int, rows: int, outputs: int, tile: Tile, scratch: Fp8Scratch) -> int:
    """The largest number of parts, at most `split`, whose sums have room."""
    tiles = cdiv(outputs, tile.block_n) * cdiv(rows, tile.block_t)
    if tiles > scratch.counters.numel():
        return 1
    room = scratch.partial.numel() // (tiles * tile.block_n * tile.block_t)
    return max(1, min(split, room))


def multiply_rows(
    x_TK: torch.Tensor,
    x_scale_T: torch.Tensor,
    weight: Fp8Weight,
    out: torch.Tensor,
    scratch: Fp8Scratch,
    tile: Tile,
    *,
    kind: str = "",
    add: bool = False,
) -> None:
    """out = x @ weight.T (+ bias), with x in float8; with a kind gated, with `add` added to what is there."""
    rows, inputs = x_TK.shape
    outputs = out.shape[1]
    split = fitting_split(tile.split, rows, weight.out_features, tile, scratch)
    tiles_n = cdiv(outputs, tile.block_n // 2 if kind else tile.block_n)
    grid = (tiles_n, cdiv(rows, tile.block_t), split)
    options: dict[str, Any] = launch_options()
    _rows_kernel[grid](
        x_TK,
        x_scale_T,
        weight.data,
        weight.scale,
        weight.bias,
        out,
        scratch.partial,
        scratch.counters,
        rows,
        outputs,
        K=inputs,
        KIND=kind_number(kind),
        HAS_BIAS=weight.bias is not None,
        ADD=add,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BLOCK_T=tile.block_t,
        SPLIT=split,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **options,
    )


def block_of(rows: int) -> int:
    """Tokens of a tile."""
    return min(max(next_power_of_2(rows), 16), 64)
