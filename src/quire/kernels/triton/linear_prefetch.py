"""Weights asked for ahead of time: a kernel that still waits for its predecessor has them brought to the L2 cache."""

import triton

from quire.kernels.triton.launch import tl


@triton.jit
def prefetch_rows(w_ptr, row_N, K, first, length, PIECES: tl.constexpr):
    """Columns first … first + length of a matrix's rows, each row in PIECES requests of a multiple of 16 bytes."""
    piece = tl.arange(0, PIECES)
    size = length // PIECES
    address = (w_ptr + row_N.to(tl.int64)[:, None] * K + (first + piece * size)[None, :]).to(tl.int64)
    num_bytes = tl.zeros_like(address).to(tl.int32) + size * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch_pieces(num_bytes: int, block_n: int, num_warps: int) -> int:
    """Requests a row, so that each thread makes one; 0 where so many bytes cannot be asked for in equal pieces."""
    pieces = max(num_warps * 32 // block_n, 1)
    return pieces if num_bytes > 0 and num_bytes % (16 * pieces) == 0 else 0
