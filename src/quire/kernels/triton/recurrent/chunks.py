"""What the scans in chunks share: where chunks begin and end, how much of a state outlives them, how they are multiplied.

Tokens that follow one another form a chunk. What they do to each other, what the state before them gives them and what they
leave in it are computed at once (matrix products, but for Mamba's), so a state is touched once a chunk instead of once a token.
Pages are cut into chunks from their first token on, so that a page's end is a chunk's.
"""

import dataclasses

import torch
import triton

from quire.attention.interface import AttentionMetadata
from quire.kernels.triton.launch import compute_capability, next_power_of_2, tl

FROM = 32
"""Tokens that a request computes in a step from which it goes by chunks. Measured on an H200: by chunks 32 tokens of 16 requests
take 63 µs (Mamba-2 2.7B) and 166 µs (Qwen3-Next), token by token 204 and 270; 16 tokens are 164 against 138 of Qwen3-Next, and of
Mamba-2 8 are even."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tokens of a chunk and channels of a program (of states of up to 128 numbers a channel; fewer of larger ones), and how a
    program runs."""

    chunk: int
    channels: int
    num_warps: int
    num_stages: int = 2

    def block(self, size: int, width: int) -> int:
        """Channels of a program, for states of `size` numbers a channel and heads of `width` channels."""
        return max(16, min(next_power_of_2(width), self.channels * 128 // max(next_power_of_2(size), 128)))


def choose_tiles(hopper: Tiles, others: Tiles) -> Tiles:
    """Hopper's tensor cores take 64 rows at a time, from shared memory; others take them from registers, which are few."""
    return hopper if compute_capability()[0] == 9 else others


def is_long(metadata: AttentionMetadata) -> bool:
    """Whether requests of a step may go by chunks: only what the host knows of it counts, so that a graph of decode steps
    never has them. Pages that end chunks too early go token by token."""
    return min(metadata.max_query_len, metadata.block_size) >= FROM


def goes_by_chunks(metadata: AttentionMetadata, dtype: torch.dtype, size: int, largest: int) -> bool:
    """The same for chunks that `multiply`, which would round the numbers of float32 models; kernels have no room for states
    larger than `largest`."""
    return is_long(metadata) and dtype != torch.float32 and size <= largest


@triton.jit
def chunks_of(start, end, position, page_size, CHUNK: tl.constexpr):
    """A request's first chunk, counted from the begin of the page where its tokens of the step begin, and the one behind its
    last."""
    a_page = (page_size + CHUNK - 1) // CHUNK
    offset = (position % page_size).to(tl.int32)
    last = offset + (end - start).to(tl.int32) - 1
    return offset // CHUNK, tl.where(start < end, last // page_size * a_page + last % page_size // CHUNK + 1, 0)


@triton.jit
def chunk_at(number, start, end, position, page_size, CHUNK: tl.constexpr):
    """The tokens of the step from and up to which chunk `number` (as `chunks_of` counts) of a request goes."""
    a_page = (page_size + CHUNK - 1) // CHUNK
    page_start = start - position % page_size + number // a_page * page_size
    first = page_start + number % a_page * CHUNK
    behind = tl.minimum(tl.minimum(first + CHUNK, page_start + page_size), end)
    return tl.maximum(first, start), behind


@triton.jit
def decays(log_L, CHUNK: tl.constexpr):
    """What is left, by the logarithms (at most 0) of each token's decay: at token i of what came with token j [i, j] (nothing
    where i < j); at token i of what was before the chunk; at the chunk's end of what came with token j; of what was before.

    A sum from j to i is the difference of two sums from the first on. Those are float64, held as pairs of float32, so that the
    digits of weak decays are there behind strong ones as well.
    """
    sum_L = tl.cumsum(tl.maximum(log_L, -1000.0).to(tl.float64), 0)
    whole = tl.sum(tl.maximum(log_L, -1000.0).to(tl.float64), 0)
    high_L, whole_high = sum_L.to(tl.float32), whole.to(tl.float32)
    low_L, whole_low = (sum_L - high_L).to(tl.float32), (whole - whole_high).to(tl.float32)
    between_LL = (high_L[:, None] - high_L[None, :]) + (low_L[:, None] - low_L[None, :])
    is_causal_LL = tl.arange(0, CHUNK)[:, None] >= tl.arange(0, CHUNK)[None, :]
    between_LL = tl.exp(tl.where(is_causal_LL, between_LL, float("-inf")))
    return between_LL, tl.exp(high_L), tl.exp((whole_high - high_L) + (whole_low - low_L)), tl.exp(whole_high)


@triton.jit
def multiply(a, b, sums):
    """sums + a @ b on the tensor cores. Float32 numbers are pairs of bfloat16 ones there: the product of such a pair and a
    bfloat16 is exact but for 2^-17 of the number, that of two pairs but for 2^-16."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(a, b, sums)
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    sums = tl.dot(a_high, b_high, sums)
    if a.dtype != tl.bfloat16:
        sums = tl.dot((a.to(tl.float32) - a_high.to(tl.float32)).to(tl.bfloat16), b_high, sums)
    if b.dtype != tl.bfloat16:
        sums = tl.dot(a_high, (b.to(tl.float32) - b_high.to(tl.float32)).to(tl.bfloat16), sums)
    return sums
