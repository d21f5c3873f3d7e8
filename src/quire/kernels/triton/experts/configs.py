"""Which kernels compute a mixture for how many tokens, and in what blocks.

Chosen by shape alone, so that a step that is recorded for a number of tokens always runs the same way. Legend: T tokens,
E experts, K experts a token.
"""

import dataclasses
import functools

from quire.kernels.triton.experts import packed as packed_experts
from quire.kernels.triton.experts.grouped import GroupedConfig
from quire.kernels.triton.experts.packed import PackedConfig

MAX_FEW_TOKENS = 2
"""Up to here tokens share so few experts that each reads its own (128 experts, 8 a token, on an H200: 1.39 and 1.16 times as
fast as the general way at one token and at two, 0.96 at four)."""


@dataclasses.dataclass(frozen=True)
class FewConfig:
    """Blocks of `few_gate_up_kernel` and `few_down_kernel`."""

    gate_up_n: int
    gate_up_k: int
    gate_up_warps: int
    down_n: int
    down_k: int
    down_warps: int


@dataclasses.dataclass(frozen=True)
class ManyConfig:
    """Blocks of `grouped_kernel` for each of the two products, and of `packed_experts_kernel` for both."""

    gate_up: GroupedConfig
    down: GroupedConfig
    packed: PackedConfig = packed_experts.INVARIANT


Config = FewConfig | ManyConfig


@functools.cache
def choose(rows: int, num_experts: int, top_k: int, item_size: int) -> Config:
    """The way to compute `rows` tokens. Measured on one H200 with 128 experts of 768, 8 a token, hidden 2,048.

    Args:
        item_size: bytes of a weight.
    """
    if rows <= MAX_FEW_TOKENS:
        return few(item_size)
    if item_size == 4:
        return INVARIANT_FLOAT
    mean = rows * top_k / num_experts
    if mean <= 6:
        grouped = GroupedConfig(True, True, 16, 128, 128, 3, 4, True)
    elif mean <= 24:
        grouped = GroupedConfig(True, True, 32, 128, 64, 3, 4, True)
    elif mean <= 40:
        grouped = GroupedConfig(False, True, 64, 128, 64, 3, 4)
    elif mean <= 56:
        grouped = GroupedConfig(True, False, 64, 128, 64, 4, 4)
    else:
        grouped = GroupedConfig(False, False, 128, 256, 64, 4 if mean <= 256 else 3, 8, True)
    return ManyConfig(grouped, grouped, packed_experts.choose(mean))


def _both(grouped: GroupedConfig) -> ManyConfig:
    return ManyConfig(grouped, grouped)


def few(item_size: int) -> FewConfig:
    """The way to compute a few tokens."""
    return FewConfig(4, 1024 // item_size, 1, 8, 2048 // item_size, 8)


INVARIANT = _both(GroupedConfig(True, True, 64, 128, 64, 4, 4))
INVARIANT_FLOAT = _both(GroupedConfig(False, True, 16, 64, 32, 2, 4))
"""The one way in which every token is computed where its bits must not depend on the batch."""
