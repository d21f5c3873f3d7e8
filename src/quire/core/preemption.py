"""How a request gives its pages back and takes them up again: recompute (drop them) or swap (host memory keeps them).

Knows pages; chooses no victims.
"""

from quire.config import SchedulerConfig
from quire.core.block_pool import NULL_BLOCK, BlockPool
from quire.core.kv_cache_manager import KVCacheManager, PrefixHit
from quire.core.request_state import Request


class PageSaver:
    """Saves and restores a request's pages.

    Args:
        swaps: move pages to host memory where there is room; otherwise they are dropped.
    """

    def __init__(self, kv: KVCacheManager, *, swaps: bool) -> None:
        self._kv = kv
        self._swaps = swaps

    def give_up(self, request: Request) -> list[tuple[int, int]]:
        """Take all pages from a request that no step in flight names. Returns what to copy: (device page, host page). Pages that
        no token will see any more are not kept: with them it would need more room when it starts again than it had."""
        self._kv.free_behind_window(request, request.num_computed_tokens)
        swap_outs = self._swap_out(request) if self._swaps and not request.was_lost else []
        request.was_lost = False
        host_block_ids, request.host_block_ids = request.host_block_ids, []
        self._kv.free(request)
        request.host_block_ids = host_block_ids
        if not swap_outs:
            request.num_computed_tokens = 0
            request.num_published = 0
            request.publishes = True
            request.prompt_logprobs = None
        return swap_outs

    def drop_saved(self, request: Request) -> None:
        """Forget what host memory keeps of a request: it is computed anew."""
        if request.is_swapped:
            self._kv.free(request)
            request.num_computed_tokens = request.num_published = 0
            request.publishes, request.prompt_logprobs = True, None

    def saved_tables(self, request: Request) -> list[list[int]]:
        """The shape of the tables that `restore` will make: 1 where a device page will be taken, 0 for null pages."""
        return [[int(block != NULL_BLOCK) for block in table] for table in request.host_block_ids]

    def has_room(self, request: Request, hit: PrefixHit, config: SchedulerConfig, *, is_alone: bool) -> bool:
        """Whether a request fits: its saved pages, or a prefix hit's, and free ones for the rest; beside others with the
        watermark's share of all pages left."""
        tables = hit.block_ids
        revived = 0 if is_alone else int(config.watermark * self._kv.pool.num_usable)
        if request.is_swapped:
            tables = self.saved_tables(request)
            revived += sum(map(sum, tables))
        elif hit.num_tokens:
            revived += self._kv.count_free(hit)
        return self._kv.can_admit(tables, revived, len(request.token_ids), config.max_open_tokens)

    def restore(self, request: Request) -> list[tuple[int, int]]:
        """Give a swapped request device pages again. Returns what to copy: (host page, device page).

        The host pages stay taken until `release_host_blocks`: a step copies out before it copies in.
        """
        request.block_ids, swap_ins = _moved(request.host_block_ids, self._kv.pool)
        request.num_released = [table.count(NULL_BLOCK) for table in request.block_ids]
        request.host_block_ids = []
        return swap_ins

    def release_host_blocks(self, swap_ins: list[tuple[int, int]]) -> None:
        """The step that copies these in has been planned: later steps may overwrite their host pages."""
        self._kv.host_pool.free(host for host, _ in swap_ins)

    def _swap_out(self, request: Request) -> list[tuple[int, int]]:
        """Reserve host pages for everything computed; nothing where there is too little room."""
        length = -(-request.num_computed_tokens // self._kv.block_size)
        tables = [table[:length] for table in request.block_ids]
        count = sum(block != NULL_BLOCK for table in tables for block in table)
        if count == 0 or count > self._kv.host_pool.num_free:
            return []
        request.host_block_ids, swap_outs = _moved(tables, self._kv.host_pool)
        return swap_outs


def _moved(tables: list[list[int]], pool: BlockPool) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The tables with fresh pages of another pool in place of each but null pages, and the pairs of pages to copy."""
    fresh = iter(pool.allocate(sum(block != NULL_BLOCK for table in tables for block in table)))
    moved = [[NULL_BLOCK if block == NULL_BLOCK else next(fresh) for block in table] for table in tables]
    pairs = [pair for pages in zip(tables, moved, strict=True) for pair in zip(*pages, strict=True)]
    return moved, [pair for pair in pairs if pair[0] != NULL_BLOCK]
