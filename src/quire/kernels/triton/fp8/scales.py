"""What stands behind a product of float8 numbers without their scales: scales, bias, and the residual, in one pass.

cuBLAS multiplies with one scale a tensor faster than with one a row and channel, where rows are some hundred or fewer.

Legend: T rows, N outputs.
"""

import torch
import triton

from quire.kernels.triton.launch import await_previous, cdiv, launch_options, tl
from quire.kernels.types import Fp8Weight

BLOCK = 1024


@triton.jit
def _scale_kernel(
    x_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    w_scale = tl.load(w_scale_ptr + n, mask=inside, other=0.0)
    await_previous(PDL, EARLY=True)
    y = tl.load(x_ptr + row * N + n, mask=inside, other=0.0).to(tl.float32) * tl.load(x_scale_ptr + row) * w_scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0)
    if ADD:
        y += tl.load(out_ptr + row * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def apply_scales(
    x_TN: torch.Tensor, x_scale_T: torch.Tensor, weight: Fp8Weight, out_TN: torch.Tensor, *, add: bool = False
) -> None:
    """out = x * scales (+ bias), or added to what is there; `out` may be `x`."""
    rows, outputs = x_TN.shape
    _scale_kernel[(cdiv(outputs, BLOCK), rows)](
        x_TN,
        x_scale_T,
        weight.scale,
        weight.bias,
        out_TN,
        outputs,
        HAS_BIAS=weight.bias is not None,
        ADD=add,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(),
    )
