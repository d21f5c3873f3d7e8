"""RMS norm and layer norm, with the residual added on the way.

A program takes one row, which stays in registers between the sums and the result. How it is summed depends on its width
alone. Programs that take several rows each, to read the weight once, were a tenth slower (H200, 16,384 rows of 4,096).
"""

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, launch_options, next_power_of_2, tl

VALUES_A_WARP = 512
"""By the width alone: the order of a sum depends on it."""


@triton.jit
def norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    residual_ptr,
    width,
    x_stride,
    out_stride,
    residual_stride,
    eps,
    IS_LAYER_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual_ptr + row * residual_stride + column
        total = x + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if IS_LAYER_NORM:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    y = x * scale * weight
    if HAS_BIAS:
        y += bias
    tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    *,
    is_layer_norm: bool,
) -> None:
    rows, width = x_TD.shape
    if not rows:
        return
    block = next_power_of_2(width)
    residual = x_TD if residual_TD is None else residual_TD
    norm_kernel[(rows,)](
        x_TD,
        weight_D,
        weight_D if bias_D is None else bias_D,
        out_TD,
        residual,
        width,
        x_TD.stride(0),
        out_TD.stride(0),
        residual.stride(0),
        eps,
        IS_LAYER_NORM=is_layer_norm,
        HAS_BIAS=bias_D is not None,
        HAS_RESIDUAL=residual_TD is not None,
        BLOCK=block,
        num_warps=min(max(block // VALUES_A_WARP, 1), 16),
        **launch_options(),
    )


@kernel("rms_norm", platform="cuda", priority=10)
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    """As `ops.rms_norm`; rows may lie apart."""
    _launch(x_TD, weight_D, None, eps, out_TD, residual_TD, is_layer_norm=False)


@kernel("layer_norm", platform="cuda", priority=10)
def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    """As `ops.layer_norm`; rows may lie apart."""
    _launch(x_TD, weight_D, bias_D, eps, out_TD, residual_TD, is_layer_norm=True)
