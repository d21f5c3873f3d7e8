"""What some models do to queries, keys and values before attention, and xIELU: rows that may lie apart, in place.

Arithmetic is float32; a row's bits depend on the row alone. Legend as in `kernels/norm.py`.
"""

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl

BLOCK = 1024
"""Values of a program that takes them one at a time."""


@triton.jit
def head_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    size,
    x_stride,
    eps,
    SUBTRACT_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One norm of one row."""
    group, column = tl.program_id(1) * size, tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + group + column, mask=inside, other=0.0)
    await_previous(PDL)
    at = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + group + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if SUBTRACT_MEAN:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + group + column, mask=inside, other=0.0)
    tl.store(at, y.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def values_kernel(
    x_ptr, numbers_ptr, index_ptr, width, x_stride, limit, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Some values of one row: KIND 0 clips them, 1 multiplies them by the row's number, 2 is xIELU."""
    await_previous(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = x_ptr + row * x_stride + column, column < width
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        x = tl.minimum(tl.maximum(x, -limit), limit)
    elif KIND == 1:
        x = x * tl.load(numbers_ptr + tl.load(index_ptr + row))
    else:
        above, below = tl.maximum(x, 0.0), tl.minimum(x, 0.0)
        x = tl.load(numbers_ptr) * above * above + tl.load(numbers_ptr + 1) * (tl.exp(below) - 1.0 - below) + 0.5 * x
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=inside)


@kernel("head_norm", platform="cuda", priority=10)
def head_norm(
    x_TGH: torch.Tensor, weight_GH: torch.Tensor, bias_GH: torch.Tensor | None, eps: float, subtract_mean: bool
) -> None:
    """As `heads.head_norm`."""
    rows, (groups, size) = x_TGH.shape[0], weight_GH.shape
    if rows:
        block = next_power_of_2(size)
        head_norm_kernel[(rows, groups)](
            x_TGH,
            weight_GH,
            weight_GH if bias_GH is None else bias_GH,
            size,
            x_TGH.stride(0),
            eps,
            SUBTRACT_MEAN=subtract_mean,
            HAS_BIAS=bias_GH is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(),
        )


def _values(x: torch.Tensor, numbers: torch.Tensor, index: torch.Tensor, limit: float, kind: int) -> None:
    rows, width = x.shape
    if rows:
        values_kernel[(rows, cdiv(width, BLOCK))](
            x, numbers, index, width, x.stride(0), limit, KIND=kind, BLOCK=BLOCK, num_warps=4, **launch_options()
        )


@kernel("clip", platform="cuda", priority=10)
def clip(x_TC: torch.Tensor, limit: float) -> None:
    """As `heads.clip`."""
    _values(x_TC, x_TC, x_TC, limit, 0)


@kernel("scale_rows", platform="cuda", priority=10)
def scale_rows(x_TC: torch.Tensor, table_L: torch.Tensor, index_T: torch.Tensor) -> None:
    """As `heads.scale_rows`."""
    _values(x_TC, table_L, index_T, 0.0, 1)


@kernel("xielu", platform="cuda", priority=10)
def xielu(x_TI: torch.Tensor, alphas_2: torch.Tensor) -> None:
    """As `xielu.xielu`."""
    _values(x_TI, alphas_2, alphas_2, 0.0, 2)
