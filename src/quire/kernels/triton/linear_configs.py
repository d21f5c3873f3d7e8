"""Which kernel multiplies how many rows by which matrix, and in what blocks.

Chosen by shape alone, so that a step that is recorded for a number of rows always runs the same way. The rules speak of
shapes and processors, not of models. Legend: T rows, N outputs, K inputs.
"""

import dataclasses
import functools

from quire.kernels.triton.launch import interpreted, next_power_of_2, num_processors

MAX_GEMV_ROWS = 4
"""Up to here a row more costs less on the ordinary units than a block of 16 on the tensor cores."""


@dataclasses.dataclass(frozen=True)
class GemvConfig:
    """Blocks of `gemv_kernel`."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: bool = False


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
    prefetch: bool = False
    norms_first: bool = False
    """A norm is a launch of its own."""


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
    if rows <= 128 and item_size == 2:
        return _dot(rows, n, k, is_pair)
    return None


def _gemv(rows: int, n: int, k: int, is_pair: bool, item_size: int) -> GemvConfig:
    vector = 16 // item_size
    num_warps = 4
    block_k = min(num_warps * 32 * vector, next_power_of_2(k))
    block_k = max(block_k, vector)
    num_warps = max(block_k // (32 * vector), 1)
    block_n = 8
    while block_n > 1 and (n // block_n < 2 * num_processors() or block_n * (2 if is_pair else 1) * rows > 16):
        block_n //= 2
    return GemvConfig(block_n, block_k, num_warps)


def _dot(rows: int, n: int, k: int, is_pair: bool) -> DotConfig:
    block_t = min(max(next_power_of_2(rows), 16), 64)
    matrix_rows = 2 * n if is_pair else n
    block_n = 64
    while block_n > 16 and matrix_rows // block_n < num_processors() // 2:
        block_n //= 2
    block_k = 128 if block_t <= 32 else 64
    if interpreted():
        block_k = 64
    return DotConfig(block_n >= 64, block_t, block_n, block_k, 1, 4, 4, True)


INVARIANT = DotConfig(True, 64, 64, 64, 1, 4, 4)
INVARIANT_FLOAT = DotConfig(False, 16, 64, 32, 1, 2, 4)
"""The one way in which every row is multiplied where its bits must not depend on the batch."""
