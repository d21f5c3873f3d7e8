"""Which kernels compute a mixture for how many tokens, and in what blocks.

Chosen by shape alone, so that a step that is recorded for a number of tokens always runs the same way. Legend: T tokens,
E experts, K experts a token.
"""

import dataclasses
import functools

from quire.kernels.triton.launch import interpreted
from quire.kernels.triton.moe_grouped import GroupedConfig

MAX_FEW_TOKENS = 4
"""Up to here tokens share so few experts that each reads its own."""


@dataclasses.dataclass(frozen=True)
class FewConfig:
    """Blocks of `few_gate_up_kernel` and `few_down_kernel`. `ahead`: the first asks for what the second reads."""

    gate_up_n: int
    gate_up_k: int
    gate_up_warps: int
    down_n: int
    down_k: int
    down_warps: int
    ahead: bool = True


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Blocks of `router_kernel`."""

    block_t: int
    block_d: int
    split: int
    stages: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class ManyConfig:
    """How many tokens are computed."""

    router: RouterConfig
    gate_up: GroupedConfig
    down: GroupedConfig


Config = FewConfig | ManyConfig


@functools.cache
def choose(rows: int, num_experts: int, top_k: int, item_size: int) -> Config:
    """The way to compute `rows` tokens.

    Args:
        item_size: bytes of a weight.
    """
    if rows <= MAX_FEW_TOKENS:
        return few(item_size)
    if item_size == 4:
        return INVARIANT_FLOAT
    router = RouterConfig(16, 256, 8, 3, 4) if rows <= 512 else RouterConfig(16, 128, 4 if rows <= 2048 else 1, 3, 4)
    mean = rows * top_k / num_experts
    if mean <= 8:
        return _both(router, GroupedConfig(True, True, 16, 128, 128, 3, 4, True))
    if mean <= 16:
        return _both(router, GroupedConfig(True, True, 32, 128, 64, 4, 4))
    if mean <= 40:
        return _both(router, GroupedConfig(False, True, 64, 128, 64, 4, 4))
    if mean <= 256:
        return _both(router, GroupedConfig(False, False, 128, 256, 64, 4, 8, True))
    return _both(router, GroupedConfig(False, False, 128, 256, 64, 3, 8, True))


def _both(router: RouterConfig, grouped: GroupedConfig) -> ManyConfig:
    return ManyConfig(router, grouped, grouped)


def few(item_size: int) -> FewConfig:
    """The way to compute a few tokens."""
    gate_up_k = 2048 if item_size == 2 and not interpreted() else 512
    return FewConfig(4, gate_up_k, gate_up_k // 512, 8, 1024 if item_size == 2 else 512, 8)


INVARIANT = ManyConfig(
    RouterConfig(16, 128, 1, 3, 4),
    GroupedConfig(True, True, 64, 128, 64, 4, 4),
    GroupedConfig(True, True, 64, 128, 64, 4, 4),
)
INVARIANT_FLOAT = ManyConfig(
    RouterConfig(16, 32, 1, 2, 4),
    GroupedConfig(False, True, 16, 64, 32, 2, 4),
    GroupedConfig(False, True, 16, 64, 32, 2, 4),
)
"""The one way in which every token is computed where its bits must not depend on the batch."""
