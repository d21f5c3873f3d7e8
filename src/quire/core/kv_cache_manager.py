"""Which pages each request holds, in every KV group: prefix lookup, growth, release behind windows, publication.

Knows requests' tables and the block pool. Knows nothing of rows, budgets or steps.
"""

import dataclasses

from quire.config.kv_spec import KVCacheConfig, KVKind
from quire.core.block_pool import NULL_BLOCK, BlockPool
from quire.core.cache_events import CacheEvents
from quire.core.kv_groups import GroupRules, group_rules
from quire.core.prefix_hash import PrefixHasher
from quire.core.request_state import Request


@dataclasses.dataclass(frozen=True)
class PrefixHit:
    """The longest prefix that need not be computed: its tokens, and the pages that hold it, by group."""

    num_tokens: int
    block_ids: list[list[int]]


NO_HIT = PrefixHit(0, [])


class KVCacheManager:
    """Hands the pool's pages to requests. All groups' tables of a request cover the same positions.

    Args:
        config: groups and numbers of pages.
        hasher: names prefixes; None turns the prefix cache off.
    """

    def __init__(self, config: KVCacheConfig, hasher: PrefixHasher | None = None) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.host_pool = BlockPool(max(2, config.num_host_blocks))  # swapping is refused where there are none
        self._hasher = hasher
        self._events: CacheEvents | None = None
        self.has_states = any(group.spec.kind is KVKind.RECURRENT for group in config.groups)
        self._rules: list[GroupRules] = [group_rules(group) for group in config.groups]
        self._local_groups = [index for index, rules in enumerate(self._rules) if rules.is_local]
        self.num_queries = 0
        self.num_hits = 0

    @property
    def num_groups(self) -> int:
        """KV groups."""
        return len(self._rules)

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prefixes are named and can be found."""
        return self._hasher is not None

    def tell(self, events: CacheEvents) -> None:
        """Have it told from now on what the prefix cache has."""
        self._events, self.pool.on_forget = events, events.forgotten

    def peak_blocks(self, num_tokens: int, max_open_tokens: int) -> int:
        """Most pages, over all groups, that a request of `num_tokens` ever holds."""
        return sum(rules.peak_blocks(num_tokens, max_open_tokens) for rules in self._rules)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix that leaves at least one token to compute. Takes no reference: `attach` does."""
        if self._hasher is None or not request.reads_cache:
            return NO_HIT
        limit = (len(request.token_ids) - 1) // self.block_size
        if limit == 0 or self.pool.num_cached == 0:
            return NO_HIT
        if not self._local_groups:
            return self._find_full(request, limit)
        self._name_pages(request, limit)
        length = self._common_hit(request.hashes, limit)
        if length == 0:
            return NO_HIT
        num_tokens = length * self.block_size
        tables: list[list[int]] = []
        for group, rules in enumerate(self._rules):
            first = rules.first_visible_block(num_tokens)
            found = [self.pool.find_cached((name, group)) for name in request.hashes[first:length]]
            tables.append([NULL_BLOCK] * first + [block for block in found if block is not None])
        return PrefixHit(num_tokens, tables)

    def find_shared(self, owner: Request, num_tokens: int) -> PrefixHit:
        """What a sibling with the same prompt can share of `owner`'s pages; `num_tokens` is a multiple of the page size."""
        length = num_tokens // self.block_size
        tables: list[list[int]] = []
        for table, rules in zip(owner.block_ids, self._rules, strict=True):
            first = rules.first_visible_block(num_tokens)
            if NULL_BLOCK in table[first:length]:
                return NO_HIT
            tables.append([NULL_BLOCK] * first + table[first:length])
        return PrefixHit(num_tokens, tables)

    def can_admit(self, tables: list[list[int]], revived: int, num_tokens: int, max_open_tokens: int) -> bool:
        """Whether a request of `num_tokens` fits into free pages beside those that `tables` gives it already.

        `revived` of these are free themselves now and will be taken. The whole length is asked for, so that a prompt is
        not begun that would have to give way half-way.
        """
        held = len(tables[0]) if tables else 0
        missing = -(-num_tokens // self.block_size) - held
        needed = revived
        for group, rules in enumerate(self._rules):
            own = len(tables[group]) - tables[group].count(NULL_BLOCK) if tables else 0
            needed += min(missing, max(rules.peak_blocks(num_tokens, max_open_tokens) - own, 1))
        return needed <= self.pool.num_free

    def count_free(self, hit: PrefixHit) -> int:
        """How many of a hit's pages are free now, so that attaching it takes them from the free list."""
        return sum(map(self.pool.count_free, hit.block_ids))

    def attach(self, request: Request, hit: PrefixHit) -> None:
        """Give a request without pages the pages of a hit."""
        if hit.num_tokens:
            for table in hit.block_ids:
                self.pool.share(table)
            request.block_ids = [list(table) for table in hit.block_ids]
        else:
            request.block_ids = [[] for _ in self._rules]
        request.num_released = [0] * self.num_groups
        request.num_published = hit.num_tokens // self.block_size if request.publishes else 0
        request.num_computed_tokens = hit.num_tokens

    def count_lookup(self, request: Request, hit: PrefixHit) -> None:
        """Statistics of an admission that looked into the prefix cache, in tokens."""
        if self._hasher is not None and request.reads_cache:
            self.num_queries += len(request.token_ids)
            self.num_hits += hit.num_tokens

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Add pages until `num_tokens` fit. Returns the new pages by group; None where too few are free."""
        tables = request.block_ids
        missing = -(-num_tokens // self.block_size) - len(tables[0])
        if missing <= 0:
            return []
        if missing * len(tables) > self.pool.num_free:
            return None
        grown: list[list[int]] = []
        for table in tables:
            blocks = self.pool.allocate(missing)
            table.extend(blocks)
            grown.append(blocks)
        return grown

    def grow_each(self, requests: list[Request]) -> list[int] | None:
        """Add one page to each request, all at once; returns the new pages. None where `grow` has to look at them one by
        one: several groups, windows, or too few free pages."""
        if len(self._rules) > 1 or self._local_groups or len(requests) > self.pool.num_free:
            return None
        blocks = self.pool.allocate(len(requests))
        for request, block in zip(requests, blocks, strict=True):
            request.block_ids[0].append(block)
        return blocks

    def free_behind_window(self, request: Request, num_computed_tokens: int) -> None:
        """Give back pages that no token from `num_computed_tokens` on can see. Those of steps in flight are not counted as
        computed: their pages are published first, so that they can be found again."""
        for group in self._local_groups:
            first_kept = self._rules[group].first_kept_block(num_computed_tokens)
            first_held = request.num_released[group]
            if first_kept > first_held:
                table = request.block_ids[group]
                self.pool.free(table[first_held:first_kept])
                table[first_held:first_kept] = [NULL_BLOCK] * (first_kept - first_held)
                request.num_released[group] = first_kept

    def free(self, request: Request) -> None:
        """Give all pages back, the last ones first, so that the prefix stays cached longest. A second call does nothing."""
        tables, request.block_ids = request.block_ids, []
        for table in tables:
            self.pool.free(reversed(table))
        host_tables, request.host_block_ids = request.host_block_ids, []
        for table in host_tables:
            self.host_pool.free(table)

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the full pages of tokens that a collected step has computed."""
        if self._hasher is None or not request.publishes:
            return
        count = num_computed_tokens // self.block_size
        if count <= request.num_published:
            return
        self._name_pages(request, count)
        first = request.num_published
        names = request.hashes[first:count]
        for group, table in enumerate(request.block_ids):
            published = self.pool.publish_run(table[first:count], names, group)
            if self._events is not None:
                self._events.stored(request, [first + index for index in published], group)
        request.num_published = count

    def name_pages(self, request: Request) -> None:
        """Hash what `publish` will need, ahead of it."""
        if self._hasher is not None and request.publishes:
            self._name_pages(request, len(request.token_ids) // self.block_size)

    def page_name(self, request: Request, index: int) -> bytes:
        """The name of one of a request's full pages; empty where pages have no names."""
        if self._hasher is None:
            return b""
        self._name_pages(request, index + 1)
        return request.hashes[index]

    def reset_prefix_cache(self) -> None:
        """Forget all published content. Pages in use stay with their owners."""
        self.pool.clear_cache()

    def _find_full(self, request: Request, limit: int) -> PrefixHit:
        """The hit where all groups keep everything. Pages are named a few more at a time, up to a miss: the names of those
        beyond it can wait for `publish`."""
        tables: list[list[int]] = [[] for _ in self._rules]
        num_named = length = 0
        while length == num_named < limit:
            num_named = min(limit, max(1, 8 * num_named))
            self._name_pages(request, num_named)
            for group, table in enumerate(tables):
                table += self.pool.find_run(request.hashes[len(table) : num_named], group)
            length = min(map(len, tables))
        return PrefixHit(length * self.block_size, [table[:length] for table in tables]) if length else NO_HIT

    def _common_hit(self, hashes: list[bytes], limit: int) -> int:
        """Leading pages that every group can do without: shorten until all agree."""
        length = limit
        while True:
            before = length
            for group, rules in enumerate(self._rules):
                length = rules.longest_hit(
                    lambda index, group=group: self.pool.find_cached((hashes[index], group)) is not None, length
                )
            if length in (before, 0):
                return length

    def _name_pages(self, request: Request, count: int) -> None:
        """Make sure that the first `count` pages have names."""
        assert self._hasher is not None
        if len(request.hashes) < count:
            if request.root_hash is None:
                request.root_hash = self._hasher.root_of(request.source)
            self._hasher.extend(
                request.hashes, request.root_hash, request.token_ids, count, request.marks(self.block_size)
            )
