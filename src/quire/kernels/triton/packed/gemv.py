"""Small codes times a row or two, at the speed at which memory gives the codes: no tensor cores, inputs as they are.

A program owns some outputs and walks along the inputs. A thread owns 32 columns of a row at a time (16, if groups have no
more): their codes are one load, they share a scale, and their products are summed before it is applied. A code of 4 bits
becomes a number without being moved: below the exponent of 2^23 it is `code * 16^i`, whose power its input is divided by.

Legend: T rows of x (a power of two at least their number), N outputs, K inputs, G runs of C columns.
"""

# ruff: noqa: RUF005 (the compiler knows sums of tuples, not unpacking)

import torch
import triton

from quire.kernels.packed import code_bits
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, num_processors, tl
from quire.kernels.types import PackedWeight

_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(8388608.0)


@triton.jit
def _load_codes(w_ptr, row_N, run_G, inside_GN, run_bytes: tl.constexpr, K_BYTES: tl.constexpr, WORDS: tl.constexpr):
    """Words [G, N, V] of four codes' bytes or eight codes' halves; or bytes [G, N, C]."""
    if WORDS:
        V: tl.constexpr = run_bytes // 4
        words = w_ptr.to(tl.pointer_type(tl.int32))
        place = (
            row_N.to(tl.int64)[None, :, None] * (K_BYTES // 4)
            + (run_G[:, None] * V + tl.arange(0, V)[None, :])[:, None, :]
        )
        codes = tl.load(words + place, mask=inside_GN[:, :, None], other=0, eviction_policy="evict_first")
    else:
        column = run_G[:, None] * run_bytes + tl.arange(0, run_bytes)[None, :]
        place = row_N.to(tl.int64)[None, :, None] * K_BYTES + column[:, None, :]
        codes = tl.load(w_ptr + place, mask=inside_GN[:, :, None], other=0, eviction_policy="evict_first")
    return codes


@triton.jit
def _number(words, table_ptr, HAS_TABLE: tl.constexpr, PLACE: tl.constexpr):
    """The codes at half-byte PLACE of 0 to 3 of each word, times 16^PLACE; a table's values are not multiplied."""
    if HAS_TABLE:
        number = tl.load(table_ptr + ((words >> (4 * PLACE)) & 15))
    else:
        number = ((words & (15 << (4 * PLACE))) | _MAGIC_BITS).to(tl.float32, bitcast=True) - _MAGIC
    return number


@triton.jit
def _halves(x, HAS_TABLE: tl.constexpr):
    """The inputs [.., 2, 2] of four half-bytes, divided by the powers of 16 that their codes are multiplied by."""
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    if not HAS_TABLE:
        second *= 1.0 / 16
        third *= 1.0 / 256
        fourth *= 1.0 / 4096
    return first, second, third, fourth


@triton.jit
def _products(words_GNV, x_GC, table_ptr, HAS_TABLE: tl.constexpr, V: tl.constexpr):
    """Sums [G, N] of codes of 4 bits times inputs."""
    low, high = tl.split(tl.permute(tl.reshape(x_GC, (x_GC.shape[0], V, 2, 2, 2)), (0, 1, 3, 4, 2)))
    total = tl.zeros(words_GNV.shape, dtype=tl.float32)
    for part in tl.static_range(2):
        if part == 0:
            first, second, third, fourth = _halves(low, HAS_TABLE)
            words = words_GNV
        else:
            first, second, third, fourth = _halves(high, HAS_TABLE)
            words = words_GNV >> 16
        total += _number(words, table_ptr, HAS_TABLE, 0) * first[:, None, :]
        total += _number(words, table_ptr, HAS_TABLE, 1) * second[:, None, :]
        total += _number(words, table_ptr, HAS_TABLE, 2) * third[:, None, :]
        total += _number(words, table_ptr, HAS_TABLE, 3) * fourth[:, None, :]
    return tl.sum(total, axis=2)


@triton.jit(do_not_specialize=["num_rows"])
def packed_gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    table_ptr,
    perm_ptr,
    bias_ptr,
    out_ptr,
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
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = x @ w.T + bias. RUN: columns of a thread, all of one group."""
    RUNS: tl.constexpr = BLOCK_K // RUN
    BYTES: tl.constexpr = RUN * BITS // 8
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = row < N
    row = tl.minimum(row, N - 1)
    groups: tl.constexpr = K // GROUP
    k_bytes: tl.constexpr = K * BITS // 8
    run = tl.arange(0, RUNS)
    column = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    codes = _load_codes(w_ptr, row, run, (run * RUN < K)[:, None] & inside_N[None, :], BYTES, k_bytes, BITS == 4)
    await_previous(PDL, EARLY=True)
    sums = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros((RUNS, BLOCK_N), dtype=tl.float32),)
    for start in range(0, K, BLOCK_K):
        next_run = (start + BLOCK_K) // RUN + run
        # The next codes are on their way while these are multiplied; behind the last column nothing is read.
        ahead = (next_run * RUN < K)[:, None] & inside_N[None, :]
        next_codes = _load_codes(w_ptr, row, next_run, ahead, BYTES, k_bytes, BITS == 4)
        is_column = start + column < K
        is_run = (start + run * RUN < K)[:, None]
        place = row.to(tl.int64)[None, :] * groups + ((start + run * RUN) // GROUP)[:, None]
        scale = tl.load(scale_ptr + place, mask=is_run, other=0.0).to(tl.float32)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + place, mask=is_run, other=0.0).to(tl.float32)
        at = start + column
        if HAS_PERM:
            at = tl.load(perm_ptr + at, mask=is_column, other=0)
        new_sums = ()
        for t in tl.static_range(T):
            x = tl.load(x_ptr + tl.minimum(t, num_rows - 1) * K + at, mask=is_column, other=0.0).to(tl.float32)
            if BITS == 4:
                part = _products(codes, x, table_ptr, HAS_TABLE, RUN // 8)
            elif IS_FLOAT:  # carried as bytes: float8 values would be taken apart and put together again
                part = tl.sum(codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * x[:, None, :], axis=2)
            else:
                part = tl.sum(codes.to(tl.float32) * x[:, None, :], axis=2)
            if HAS_ZERO:
                part -= zero * tl.sum(x, axis=1)[:, None]
            new_sums = new_sums + (sums[t] + part * scale,)
        sums = new_sums
        codes = next_codes
    for t in tl.static_range(T):
        y = tl.sum(sums[t], axis=0)
        if HAS_BIAS:
            y += tl.load(bias_ptr + row)
        out = out_ptr + tl.cast(t, tl.int64) * N + row
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside_N & (t < num_rows))


def max_rows(weight: PackedWeight) -> int:
    """Up to here this is the faster way (H200, Llama-3.1-8B's shapes): at four rows inputs do not fit into registers, at two they
    do where codes stand for a table's values, which are slow in the other way too."""
    return 1 if weight.table is None else 2


def launch_packed_gemv(x_TK: torch.Tensor, weight: PackedWeight, out_TN: torch.Tensor) -> None:
    """One product of a few rows."""
    codes, scale_NG = weight.plain()
    (rows, n), k = out_TN.shape, weight.in_features
    group, bits = k // scale_NG.shape[1], code_bits(codes)
    run = 32 if bits == 4 and group % 32 == 0 else 16
    reach = 32 * run  # columns that a warp reads at once
    block_k = max(min(next_power_of_2(k), 4 * reach), 2 * run)
    block_n = 8
    while block_n > 1 and n < block_n * num_processors():
        block_n //= 2
    packed_gemv_kernel[(cdiv(n, block_n),)](
        x_TK,
        codes.view(torch.int8) if bits == 8 else codes,
        scale_NG,
        weight.zero,
        weight.table,
        weight.perm,
        weight.bias,
        out_TN,
        rows,
        n,
        K=k,
        GROUP=group,
        BITS=bits,
        IS_FLOAT=codes.is_floating_point(),
        HAS_ZERO=weight.zero is not None,
        HAS_TABLE=weight.table is not None,
        HAS_PERM=weight.perm is not None,
        HAS_BIAS=weight.bias is not None,
        T=next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        RUN=run,
        num_warps=max(block_k // reach, 1),
        **launch_options(),
    )
