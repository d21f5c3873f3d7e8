"""Small codes times many rows, on the tensor cores: codes become values in registers, tile by tile.

A program owns a block of outputs for a block of rows. The weights are the left factor, as in `linear_dot`. With SPLIT > 1 several
programs share a block's inputs; the last to finish adds their parts in order.

Legend: T rows of x, N outputs, K inputs, S groups of a tile's columns.
"""

import torch
import triton

from quire.kernels.packed import code_bits
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, num_processors, tl
from quire.kernels.triton.linear.dot import COUNTERS, split_workspace
from quire.kernels.triton.packed.tiles import finish, sum_parts
from quire.kernels.types import PackedWeight

MAX_SPLIT = 8


@triton.jit
def _values(
    w_ptr,
    scale_ptr,
    zero_ptr,
    table_ptr,
    row_N,
    start,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Values [N, BLOCK_K] in float32; of columns behind the last, anything finite."""
    PARTS: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    BYTES: tl.constexpr = BLOCK_K * BITS // 8
    at = start * BITS // 8 + tl.arange(0, BYTES)
    row = row_N.to(tl.int64)[:, None]
    codes = tl.load(w_ptr + row * (K * BITS // 8) + at[None, :], mask=(at < K * BITS // 8)[None, :], other=0)
    if BITS == 4:
        codes = tl.interleave(codes & 15, codes >> 4)
    if HAS_TABLE:
        values = tl.load(table_ptr + codes.to(tl.int32))
    elif IS_FLOAT:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        values = codes.to(tl.float32)
    place = row * (K // GROUP) + (start // GROUP + tl.arange(0, PARTS))[None, :]
    scale_NS = tl.load(scale_ptr + place).to(tl.float32)
    values = tl.reshape(values, (row_N.shape[0], PARTS, BLOCK_K // PARTS))
    if HAS_ZERO:
        values -= tl.load(zero_ptr + place).to(tl.float32)[:, :, None]
    return tl.reshape(values * scale_NS[:, :, None], (row_N.shape[0], BLOCK_K))


@triton.jit(do_not_specialize=["num_rows"])
def packed_dot_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    table_ptr,
    perm_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_PERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = x @ w.T + bias."""
    block_n, block_t, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    t = block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = (t < num_rows)[None, :]
    x_rows = x_ptr + tl.minimum(t, num_rows - 1).to(tl.int64)[None, :] * K
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    first = part * length
    await_previous(PDL, EARLY=True)
    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in tl.range(first, tl.minimum(first + length, K), BLOCK_K, num_stages=STAGES):
        w = _values(
            w_ptr, scale_ptr, zero_ptr, table_ptr, row, start, K, GROUP, BITS, IS_FLOAT, HAS_ZERO, HAS_TABLE, BLOCK_K
        )
        at = start + tl.arange(0, BLOCK_K)
        is_column = at < K
        if HAS_PERM:
            at = tl.load(perm_ptr + at, mask=is_column, other=0)
        x = tl.load(x_rows + at[:, None], mask=is_column[:, None] & is_row, other=0.0)
        sums = tl.dot(w.to(x.dtype), x, sums, input_precision="ieee")
    if SPLIT > 1:
        place = block_t * tl.num_programs(0) + block_n
        sums, is_last = sum_parts(sums, partial_ptr, counter_ptr, place, part, SPLIT, is_row, SPLIT)
        if is_last:
            finish(sums, bias_ptr, out_ptr, n, t, num_rows, N, HAS_BIAS, False)
    else:
        finish(sums, bias_ptr, out_ptr, n, t, num_rows, N, HAS_BIAS, False)


def block_k_of(group: int, k: int) -> int:
    """Columns of a tile: a part of a group, or whole small groups; 0 where neither works."""
    if group in (16, 32) and k % 64 == 0:
        return 64
    return next((block for block in (128, 64, 32, 16) if group % block == 0), 0)


def launch_packed_dot(
    x_TK: torch.Tensor, weight: PackedWeight, out_TN: torch.Tensor, *, block_t: int, may_split: bool
) -> None:
    """One product of any number of rows; with `may_split` sums depend on how many there are."""
    codes, scale_NG = weight.plain()
    (rows, n), k = out_TN.shape, weight.in_features
    group = k // scale_NG.shape[1]
    block_n, block_k, split = 64, block_k_of(group, k), 1
    blocks = cdiv(n, block_n), cdiv(rows, block_t)
    partial, counter = split_workspace(x_TK.device)
    tiles = blocks[0] * blocks[1]
    while (
        may_split
        and split < MAX_SPLIT
        and tiles * split < num_processors()
        and k // block_k >= 4 * split
        and tiles <= COUNTERS
        and tiles * 2 * split * block_n * block_t <= partial.numel()
    ):
        split *= 2
    packed_dot_kernel[(*blocks, split)](
        x_TK,
        codes.view(torch.int8) if code_bits(codes) == 8 else codes,
        scale_NG,
        weight.zero,
        weight.table,
        weight.perm,
        weight.bias,
        out_TN,
        partial,
        counter,
        rows,
        n,
        K=k,
        GROUP=group,
        BITS=code_bits(codes),
        IS_FLOAT=codes.is_floating_point(),
        HAS_ZERO=weight.zero is not None,
        HAS_TABLE=weight.table is not None,
        HAS_PERM=weight.perm is not None,
        HAS_BIAS=weight.bias is not None,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLIT=split,
        STAGES=3,
        num_warps=4,
        **launch_options(),
    )
