"""Rows picked by index: the tokens whose logits a step wants."""

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, tl

BLOCK = 1024


@triton.jit
def gather_rows_kernel(x_ptr, index_ptr, out_ptr, width, x_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(index_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + source * x_stride + column, mask=inside)
    tl.store(out_ptr + row * out_stride + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("gather_rows", platform="cuda", priority=10)
def gather_rows(x_TD: torch.Tensor, index_S: torch.Tensor, out_SD: torch.Tensor) -> None:
    """As `ops.gather_rows`; rows may lie apart."""
    rows, width = out_SD.shape
    if rows:
        gather_rows_kernel[(rows, cdiv(width, BLOCK))](
            x_TD,
            index_S,
            out_SD,
            width,
            x_TD.stride(0),
            out_SD.stride(0),
            BLOCK=BLOCK,
            num_warps=4,
            **launch_options(),
        )
