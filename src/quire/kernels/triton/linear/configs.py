"""Which kernel multiplies how many rows by which matrix, and in what blocks.

Chosen by shape alone, so that a step that is recorded for a number of rows always runs the same way. The rules speak of
shapes and processors, not of models. Legend: T rows, N outputs, K inputs.
"""

import dataclasses
import functools

import triton

from quire.kernels.triton.launch import current_device, interpreted, next_power_of_2, num_processors

SMALL_MATRIX = 8 << 20
"""Values of a matrix that the L2 cache takes beside what else is in it."""

MAX_GEMV_ROWS, MAX_PLAIN_GEMV_ROWS = 2, 4
"""Up to here a row more costs less on the ordinary units than a block of 16 on the tensor cores (H200)."""

MAX_DOT_ROWS = 64
"""From here cuBLAS is faster, its norms and activations included (H200)."""


@dataclasses.dataclass(frozen=True)
class GemvConfig:
    """Blocks of `gemv_kernel`."""

    block_n: int
    block_k: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """Blocks of `dot_kernel`."""

    block_t: int
    block_n: int
    block_k: int
    split: int
    stages: int
    num_warps: int
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
    matrix_rows = 2 * n if is_pair else n
    is_small = matrix_rows * k <= SMALL_MATRIX
    if rows <= MAX_GEMV_ROWS or (rows <= MAX_PLAIN_GEMV_ROWS and is_small and not is_normed):
        return _gemv(rows, n, k, is_small, item_size)
    if rows > MAX_DOT_ROWS or item_size != 2:
        return None
    block_t = max(next_power_of_2(rows), 16)
    if interpreted():
        return DotConfig(block_t, 64, 64, 1, 2, 4)
    config = (
        _dot_of_small(block_t, matrix_rows, is_normed) if is_small else _dot_of_large(block_t, matrix_rows, is_normed)
    )
    return None if config is None else _that_fits(config)


def _that_fits(config: DotConfig) -> DotConfig:
    """With as many tiles in flight as this device's shared memory holds."""
    tile_bytes = (config.block_t + config.block_n) * config.block_k * 2
    return dataclasses.replace(config, stages=max(min(config.stages, (_shared_memory() - 4096) // tile_bytes), 2))


@functools.cache
def _shared_memory() -> int:
    """Bytes of shared memory that a program may have."""
    utilities = triton.runtime.driver.active.utils
    return utilities.get_device_properties(current_device())["max_shared_mem"]


def _gemv(rows: int, n: int, k: int, is_small: bool, item_size: int) -> GemvConfig:
    """Whole rows in registers where they fit, in programs of a few warps; the longer a row, the more warps."""
    reach = 32 * (16 // item_size)  # values that a warp reads at once
    if k <= 4 * reach:
        block_k = max(next_power_of_2(k), reach)
        block_n, num_warps = 4, max(block_k // (2 * reach), 1)
    elif rows == 1 or is_small:
        block_k = min(next_power_of_2(k), 16 * reach if k <= 16 * reach else 8 * reach)
        block_n, num_warps = (2 if rows == 1 else 4), block_k // (2 * reach)
        if k > 16 * reach:
            block_n, num_warps = 8, 8
    else:
        block_n, block_k, num_warps = 4, 4 * reach, 4
    while block_n > 1 and n < block_n * num_processors():
        block_n //= 2
    return GemvConfig(block_n, block_k, num_warps)


def _dot_of_small(block_t: int, matrix_rows: int, is_normed: bool) -> DotConfig:
    """Few rows are made more programs by splitting."""
    if block_t == 16 and is_normed:
        return DotConfig(block_t, 64, 256, 1, 3, 4)
    split = 4 if matrix_rows < 16 * num_processors() else 1
    return DotConfig(block_t, 64, 128, split, 4, 4, norms_first=block_t >= 32)


def _dot_of_large(block_t: int, matrix_rows: int, is_normed: bool) -> DotConfig | None:
    """As much in flight as shared memory holds, with two programs a processor where there are so many."""
    many = matrix_rows >= 128 * num_processors()
    if block_t == 64 and not many and not is_normed:
        return None
    if block_t == 64 and many and is_normed:
        return DotConfig(block_t, 128, 64, 1, 6, 8, norms_first=True)
    stages = 4 if many and block_t < 64 else 6
    return DotConfig(block_t, 64, 128, 1, stages, 4, norms_first=block_t >= 32)


INVARIANT = DotConfig(64, 64, 64, 1, 4, 4, norms_first=True)
INVARIANT_FLOAT = DotConfig(16, 64, 32, 1, 2, 4, norms_first=True)
"""The one way in which every row is multiplied where its bits must not depend on the batch."""
