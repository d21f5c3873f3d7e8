"""Weights asked for ahead of time: a kernel that still waits for its predecessor has them brought to the L2 cache."""

import triton

from quire.kernels.triton.launch import tl

LANES = tl.constexpr(32)


@triton.jit
def prefetch_rows(w_ptr, row_E, K, first, length):
    """Columns first … first + length of a matrix's rows, a row by one lane of a warp: others would do it one after another.

    row_E names each row LANES times. The columns' bytes are multiples of 16 (`may_prefetch`)."""
    address = (w_ptr + row_E.to(tl.int64) * K + first).to(tl.int64)
    num_bytes = tl.zeros_like(row_E).to(tl.int32) + length * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        """{
        .reg .pred is_first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 is_first, lane, 0;
        @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def may_prefetch(columns: int, item_size: int) -> bool:
    """Whether a request for so many columns is a multiple of 16 bytes, as the device wants it."""
    return columns > 0 and columns * item_size % 16 == 0
