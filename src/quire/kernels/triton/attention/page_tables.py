"""Page tables by request: what attention libraries read, who know nothing of rows.

Knows `AttentionMetadata`. Legend: B requests, R rows, P pages that a row may have.
"""

import torch
import triton

from quire.attention.interface import AttentionMetadata
from quire.kernels.triton.launch import await_previous, launch_options, tl

BLOCK = 1024


@triton.jit
def gather_tables_kernel(
    tables,
    rows,
    seq_lens,
    out_tables,
    out_lens,
    num_rows,
    tables_stride,
    out_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.minimum(tl.load(rows + request), num_rows - 1).to(tl.int64)
    length = tl.maximum(tl.load(seq_lens + request), 1)
    tl.store(out_lens + request, length)
    num_pages = (length + PAGE - 1) // PAGE
    for first in range(0, num_pages, BLOCK):
        place = first + tl.arange(0, BLOCK)
        page = tl.load(tables + row * tables_stride + place, mask=place < num_pages, other=0)
        tl.store(out_tables + request * out_stride + place, page, mask=place < num_pages)


def gather_tables(metadata: AttentionMetadata, tables_BP: torch.Tensor, lens_B: torch.Tensor) -> None:
    """Fill the first `num_requests` rows of `tables_BP` (int32) with the requests' pages, as many as their tokens need; what
    stands behind those stays. `lens_B` (int32) gets the lengths, and 1 for requests that are none: their page is some page.
    """
    if metadata.num_requests:
        gather_tables_kernel[(metadata.num_requests,)](
            metadata.block_table,
            metadata.rows,
            metadata.seq_lens,
            tables_BP,
            lens_B,
            metadata.block_table.shape[0],
            metadata.block_table.stride(0),
            tables_BP.stride(0),
            PAGE=metadata.block_size,
            BLOCK=BLOCK,
            **launch_options(),
        )
