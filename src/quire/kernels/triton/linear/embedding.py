"""Rows of a table by token id: embeddings, and learned positions added to them."""

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, tl
from quire.kernels.types import LinearWeight

BLOCK = 1024


@triton.jit
def embedding_kernel(
    ids_ptr, table_ptr, out_ptr, num_ids, width, scale, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """An id outside the table gives zeros: what padding holds is nobody's business, but must not be read."""
    await_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + t).to(tl.int64)
    inside = column < width
    known = (token >= 0) & (token < num_ids)
    row = tl.load(table_ptr + token * width + column, mask=inside & known, other=0.0).to(tl.float32)
    out = out_ptr + t * width + column
    if ADD:
        row += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    else:
        row *= scale
    tl.store(out, row.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float, add: bool) -> None:
    tokens, width = out_TD.shape
    if not tokens:
        return
    embedding_kernel[(tokens, cdiv(width, BLOCK))](
        ids_T,
        weight.data,
        out_TD,
        weight.out_features,
        width,
        float(scale),
        ADD=add,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(),
    )


@kernel("embedding", platform="cuda", priority=10)
def embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    """As `ops.embedding`."""
    _launch(ids_T, weight, out_TD, scale, False)


@kernel("add_embedding", platform="cuda", priority=10)
def add_embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor) -> None:
    """As `ops.add_embedding`."""
    _launch(ids_T, weight, out_TD, 1.0, True)
