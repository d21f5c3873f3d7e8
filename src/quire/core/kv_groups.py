"""What each kind of KV group keeps of a request's pages, and how much of a cached prefix it needs.

One small class a kind; knows page counts and positions, never page ids' owners or hashes' making.
"""

import abc
from collections.abc import Callable

from quire.config.kv_spec import KVCacheGroup, KVCacheSpec, KVKind
from quire.plugins.registry import Registry


class GroupRules(abc.ABC):
    """How one KV group uses its pages. Pages are counted by position: page i holds tokens i * block_size on."""

    is_local = True
    """Whether pages are given back while the request goes on."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.block_size = spec.block_size
        self.window = spec.window

    @abc.abstractmethod
    def first_visible_block(self, num_computed_tokens: int) -> int:
        """The first page that the token at position `num_computed_tokens` may read."""

    @abc.abstractmethod
    def peak_blocks(self, num_tokens: int, max_open_tokens: int) -> int:
        """Most pages that a request of `num_tokens` holds at once. Pages are given back once their step was collected, and
        at most `max_open_tokens` are in steps that were not."""

    @abc.abstractmethod
    def longest_hit(self, is_cached: Callable[[int], bool], limit: int) -> int:
        """Most leading pages, up to `limit`, that need not be computed, given which pages can be found."""

    def first_kept_block(self, num_computed_tokens: int) -> int:
        """The first page worth keeping. Lags one page behind what is visible, so that the last full page boundary stays a
        point where a sibling or a later request can join."""
        return self.first_visible_block(max(0, num_computed_tokens - 1) // self.block_size * self.block_size)


class FullRules(GroupRules):
    """Every token sees all before it (full attention, MLA)."""

    is_local = False

    def first_visible_block(self, num_computed_tokens: int) -> int:
        return 0

    def peak_blocks(self, num_tokens: int, max_open_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def longest_hit(self, is_cached: Callable[[int], bool], limit: int) -> int:
        for index in range(limit):
            if not is_cached(index):
                return index
        return limit


class _LocalRules(GroupRules):
    """Every token sees a bounded past."""

    def peak_blocks(self, num_tokens: int, max_open_tokens: int) -> int:
        # What is written, what its first token sees, the lag, and a part page at either end.
        bounded = (max_open_tokens + self.window) // self.block_size + 4
        return min(-(-num_tokens // self.block_size), bounded)

    def longest_hit(self, is_cached: Callable[[int], bool], limit: int) -> int:
        length = index = limit
        while length > 0:
            needed = self.first_visible_block(length * self.block_size)
            while index > needed and is_cached(index - 1):
                index -= 1
            if index <= needed:
                return length
            length = index = index - 1
        return 0


class SlidingWindowRules(_LocalRules):
    """A token sees itself and the window - 1 tokens before it."""

    def first_visible_block(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.window + 1) // self.block_size


class ChunkedLocalRules(_LocalRules):
    """A token sees those before it in its own chunk of `window` tokens."""

    def first_visible_block(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.window * self.window // self.block_size


class RecurrentRules(_LocalRules):
    """A page holds the state after its last computed token, and a token sees the state before it: a window of one token.

    A step writes the state at every page boundary that it crosses, so that a later request can join there; it finds the
    boundary's page alone.
    """

    def first_visible_block(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1) // self.block_size

    def first_kept_block(self, num_computed_tokens: int) -> int:
        # No lag: states are large, and a boundary's is published before it is given back.
        return self.first_visible_block(num_computed_tokens)

    def peak_blocks(self, num_tokens: int, max_open_tokens: int) -> int:
        # What is written, the state that it begins with, and a page allocated ahead.
        return min(-(-num_tokens // self.block_size), -(-max_open_tokens // self.block_size) + 2)


RULES: Registry[type[GroupRules]] = Registry(
    "KV rules",
    "rules",
    {
        KVKind.FULL.value: FullRules,
        KVKind.MLA.value: FullRules,
        KVKind.SLIDING_WINDOW.value: SlidingWindowRules,
        KVKind.CHUNKED_LOCAL.value: ChunkedLocalRules,
        KVKind.RECURRENT.value: RecurrentRules,
    },
)
"""By kind, and by the name that a spec gives (`KVCacheSpec.rules`). A plugin registers its own in every core's process."""


def group_rules(group: KVCacheGroup) -> GroupRules:
    """The rules of a group. Raises ConfigError: its spec names some that nobody has registered."""
    name = group.spec.rules or group.spec.kind.value
    RULES.entry(name)
    return RULES[name](group.spec)
