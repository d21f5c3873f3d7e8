"""Weights asked for before they are needed: into the L2 cache, while the kernel before still runs."""

import triton

from quire.kernels.triton.launch import tl


@triton.jit
def prefetch_rows(rows, size, PIECES: tl.constexpr):
    """Ask for the first size * PIECES values of each row (pointers [N, 1]) to be brought to the L2 cache, in PIECES requests
    a row. `size` values are a multiple of 16 bytes."""
    address = (rows + (tl.arange(0, PIECES) * size)[None, :]).to(tl.int64)
    num_bytes = tl.zeros_like(address).to(tl.int32) + size * (rows.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
