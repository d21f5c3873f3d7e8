"""Int8 matrices times inputs that are rounded to int8, a row at a time, on the tensor cores. Sums are whole numbers: exact.

Legend: T rows of x, N outputs, K inputs.
"""

import torch
import triton

from quire.kernels.packed import INT8_MAX, INT8_MIN_SCALE
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.types import Int8Weight

_MAX = tl.constexpr(INT8_MAX)
_MIN_SCALE = tl.constexpr(INT8_MIN_SCALE)
_ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it rounds to a whole number, to even at the half."""


@triton.jit
def _round_rows(
    x_ptr,
    given_ptr,
    out_ptr,
    scale_ptr,
    K: tl.constexpr,
    IS_STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    await_previous(PDL)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), _MAX), _MIN_SCALE)
    rounded = tl.minimum(tl.maximum(tl.div_rn(x, scale), -_MAX), _MAX) + _ROUNDS - _ROUNDS
    tl.store(out_ptr + row * K + k, rounded.to(tl.int8), mask=k < K)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=["num_rows"])
def _int8_dot(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = (x @ w.T) * x scale * w scale + bias; the weights are the left factor."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = tl.minimum(t, num_rows - 1)
    k = tl.arange(0, BLOCK_K)
    await_previous(PDL, EARLY=True)
    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.int32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = start + k < K
        w = tl.load(w_ptr + row.to(tl.int64)[:, None] * K + (start + k)[None, :], mask=inside[None, :], other=0)
        x = tl.load(x_ptr + token.to(tl.int64)[None, :] * K + (start + k)[:, None], mask=inside[:, None], other=0)
        sums = tl.dot(w, x, sums, out_dtype=tl.int32)
    y = sums.to(tl.float32) * tl.load(x_scale_ptr + token)[None, :] * tl.load(w_scale_ptr + row)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row)[:, None]
    out = out_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, tl.trans(y).to(out_ptr.dtype.element_ty), mask=(t < num_rows)[:, None] & (n < N)[None, :])


def launch_int8(x_TK: torch.Tensor, weight: Int8Weight, out_TN: torch.Tensor) -> None:
    """Round the rows, then multiply. Rows take a byte a value for as long as the product runs."""
    assert weight.data is not None
    (rows, n), k = out_TN.shape, weight.in_features
    rounded_TK = torch.empty(rows, k, dtype=torch.int8, device=x_TK.device)
    scale_T = torch.empty(rows, dtype=torch.float32, device=x_TK.device)
    block = next_power_of_2(k)
    _round_rows[(rows,)](
        x_TK,
        weight.input_scale,
        rounded_TK,
        scale_T,
        K=k,
        IS_STATIC=weight.input_scale is not None,
        BLOCK=block,
        num_warps=min(max(block // 1024, 4), 16),
        **launch_options(),
    )
    block_t = min(max(next_power_of_2(rows), 16), 128)
    _int8_dot[(cdiv(n, 64), cdiv(rows, block_t))](
        rounded_TK,
        scale_T,
        weight.data,
        weight.scale,
        weight.bias,
        out_TN,
        rows,
        n,
        K=k,
        HAS_BIAS=weight.bias is not None,
        BLOCK_T=block_t,
        BLOCK_N=64,
        BLOCK_K=128,
        STAGES=3,
        num_warps=4,
        **launch_options(),
    )
