"""Rows of activations to float8 (e4m3) with a scale each, in one pass: as they are, RMS-normed, or gated.

One program a row, which holds the whole row in registers. The arithmetic is that of `kernels/fp8.py` to the bit
where the row comes as it is.

Legend: T rows, K values of a quantized row.
"""

from typing import Any

import torch
import triton

from quire.kernels.fp8 import FP8_MAX, FP8_MIN_SCALE
from quire.kernels.triton.launch import await_previous, launch_options, next_power_of_2, tl
from quire.kernels.triton.norm.activations import KINDS, activate
from quire.kernels.types import Fp8Weight

MAX_BLOCK = 32768
"""Values of a row that one program can hold."""
_MAX = tl.constexpr(FP8_MAX)
_MIN_SCALE = tl.constexpr(FP8_MIN_SCALE)


def kind_number(kind: str) -> int:
    """An activation's number, or -1 for none."""
    return KINDS.index(kind) if kind else -1


@triton.jit
def _quantize_rows(
    x_ptr,
    norm_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    input_scale_ptr,
    out_ptr,
    scale_ptr,
    eps,
    K: tl.constexpr,
    KIND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    mask = k < K
    if HAS_NORM:
        norm = tl.load(norm_ptr + k, mask=mask, other=0.0).to(tl.float32)
    await_previous(PDL)
    if KIND < 0:
        x = tl.load(x_ptr + row * K + k, mask=mask, other=0.0).to(tl.float32)
    else:
        gate = tl.load(x_ptr + row * (2 * K) + k, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * (2 * K) + K + k, mask=mask, other=0.0).to(tl.float32)
        if HAS_SCALES:
            row_scale = tl.load(x_scale_ptr + row)
            gate *= row_scale * tl.load(w_scale_ptr + k, mask=mask, other=0.0)
            up *= row_scale * tl.load(w_scale_ptr + K + k, mask=mask, other=0.0)
            if HAS_BIAS:
                gate += tl.load(bias_ptr + k, mask=mask, other=0.0)
                up += tl.load(bias_ptr + K + k, mask=mask, other=0.0)
        x = activate(gate, KIND) * up
    if HAS_NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * norm
    if IS_STATIC:
        scale = tl.load(input_scale_ptr)
        inverse = tl.div_rn(1.0, scale)
    else:
        largest = tl.maximum(tl.max(tl.abs(x), axis=0), _MIN_SCALE * _MAX)
        scale = tl.div_rn(largest, _MAX)
        inverse = tl.div_rn(_MAX, largest)
    x = tl.minimum(tl.maximum(x * inverse, -_MAX), _MAX)
    tl.store(out_ptr + row * K + k, x.to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + row, scale)


def quantize_rows(
    x: torch.Tensor,
    out_TK: torch.Tensor,
    scale_T: torch.Tensor,
    *,
    norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: str = "",
    input_scale: torch.Tensor | None = None,
    product: tuple[torch.Tensor, Fp8Weight] | None = None,
) -> None:
    """out, scale = float8 of x [T, K], of rms_norm(x), or with a kind of act(x[:, :K]) * x[:, K:].

    Args:
        product: for a gated x that is a float8 product without its scales: the rows' scales, and the weight.
    """
    x_scale_T, weight = product or (None, None)
    bias = None if weight is None else weight.bias
    rows, columns = out_TK.shape
    block = next_power_of_2(columns)
    warps = min(max(block // 1024, 4), 16)
    options: dict[str, Any] = launch_options()
    _quantize_rows[(rows,)](
        x,
        norm_D,
        x_scale_T,
        None if weight is None else weight.scale,
        bias,
        input_scale,
        out_TK,
        scale_T,
        eps,
        K=columns,
        KIND=kind_number(kind),
        HAS_NORM=norm_D is not None,
        HAS_SCALES=weight is not None,
        HAS_BIAS=bias is not None,
        IS_STATIC=input_scale is not None,
        BLOCK=block,
        num_warps=warps,
        **options,
    )
