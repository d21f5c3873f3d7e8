"""Which kernel multiplies how many rows by which matrix, and in what blocks.

Chosen by shape alone, so that a step that is recorded for a number of rows always runs the same way. The rules speak of
shapes and processors, not of models. Legend: T rows, N outputs, K inputs.
"""

import dataclasses
import functools

from quire.kernels.triton.launch import interpreted, next_power_of_2, num_processors

SMALL_MATRIX = 8 << 20
"""Values of a matrix that the L2 cache takes beside what else is in it."""

MAX_GEMV_ROWS = 2
"""Up to here a row more costs less on the ordinary units than a block of 16 on the tensor cores."""


@dataclasses.dataclass(frozen=True)
class GemvConfig:
    """Blocks of `gemv_kernel`."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: bool = False
    early: bool = False


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """Blocks of `dot_kernel`."""

    swap: bool
    block_t: int
    block_n: int
    block_k: int
    split: int
    stages: int
    num_warps: int
    prefetch: int = 0
    """Columns of the weight that are asked for ahead of time."""
    weights_first: bool = False
    norms_first: bool = False
    """A norm is a launch of its own."""
    early: bool = False


ALL = 1 << 30

Config = GemvConfig | DotConfig | None
"""None: the vendor's library."""


@functools.cache
def choose(rows: int, n: int, k: int, is_pair: bool, is_normed: bool, item_size: int) -> Config:
    """The way to multiply `rows` rows.

    Args:
        n: outputs of the operation; a gated pair's matrix has twice as many rows.
        is_pair: a gate and an up projection in one.
        is_normed: the rows are normed on the way.
        item_size: bytes of a weight.
    """
    if rows <= MAX_GEMV_ROWS:
        return _gemv(rows, n, k, is_pair, item_size)
    if rows <= 64 and item_size == 2:
        return _dot(rows, n, k, is_pair)
    return None


def _gemv(rows: int, n: int, k: int, is_pair: bool, item_size: int) -> GemvConfig:
    lanes = 32 * (16 // item_size)
    widest = next_power_of_2(k)
    if rows == 1 and k % 2048 == 0 and k <= 4096:
        block_k, num_warps = k, 4 if k <= 2048 else 8
    else:
        block_k = max(min(widest, 8 * lanes if k > 2048 else 4 * lanes), lanes)
        num_warps = max(block_k // lanes // (2 if k <= 1024 else 1), 1)
    block_n = 4 if k <= 1024 or k > 4096 else 2
    while block_n > 1 and n < block_n * num_processors():
        block_n //= 2
    return GemvConfig(block_n, block_k, num_warps)


def _dot(rows: int, n: int, k: int, is_pair: bool) -> DotConfig | None:
    block_t = max(next_power_of_2(rows), 16)
    matrix_rows = 2 * n if is_pair else n
    if interpreted():
        return DotConfig(True, block_t, 64, 64, 1, 2, 4)
    is_small = matrix_rows * k <= SMALL_MATRIX
    if is_small:
        split = 4 if matrix_rows < 32 * num_processors() // 2 else 1
        return DotConfig(True, block_t, 64, 128, split, 4, 4, ALL, norms_first=block_t >= 32)
    if k > 2 * n and not is_pair:
        return DotConfig(True, block_t, 128, 128, 4, 3, 8)
    if matrix_rows >= 64 * 2 * num_processors():
        return DotConfig(True, block_t, 64, 128, 1, 4, 4)
    if n >= k and matrix_rows <= 64 * num_processors() and n == k:
        return DotConfig(True, block_t, 128, 128, 4, 3, 8)
    return None


INVARIANT = DotConfig(True, 64, 64, 64, 1, 4, 4)
INVARIANT_FLOAT = DotConfig(False, 16, 64, 32, 1, 2, 4)
"""The one way in which every row is multiplied where its bits must not depend on the batch."""
