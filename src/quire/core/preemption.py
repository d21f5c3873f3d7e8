"""How a request gives its pages back and takes them up again: recompute (drop them) or swap (host memory keeps them).

Knows pages; chooses no victims.
"""

from quire.config import SchedulerConfig
from quire.core.block_pool import NULL_BLOCK
from quire.core.kv_cache_manager import KVCacheManager, PrefixHit
from quire.core.request_state import Request

NO_HOST_BLOCK = -1


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
        return [[int(block != NO_HOST_BLOCK) for block in table] for table in request.host_block_ids]

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
        swap_ins: list[tuple[int, int]] = []
        request.block_ids = []
        request.num_released = []
        for host_table in request.host_block_ids:
            count = sum(1 for block in host_table if block != NO_HOST_BLOCK)
            fresh = iter(self._kv.pool.allocate(count))
            table = [NULL_BLOCK if block == NO_HOST_BLOCK else next(fresh) for block in host_table]
            swap_ins += [(host, device) for host, device in zip(host_table, table, strict=True) if device != NULL_BLOCK]
            request.block_ids.append(table)
            request.num_released.append(len(host_table) - count)
        request.host_block_ids = []
        return swap_ins

    def release_host_blocks(self, swap_ins: list[tuple[int, int]]) -> None:
        """The step that copies these in has been planned: later steps may overwrite their host pages."""
        self._kv.host_pool.free(host for host, _ in swap_ins)

    def _swap_out(self, request: Request) -> list[tuple[int, int]]:
        """Reserve host pages for everything computed; nothing where there is too little room."""
        length = -(-request.num_computed_tokens // self._kv.block_size)
        tables = [table[:length] for table in request.block_ids]
        count = sum(1 for table in tables for block in table if block != NULL_BLOCK)
        if count == 0 or count > self._kv.host_pool.num_free:
            return []
        fresh = iter(self._kv.host_pool.allocate(count))
        request.host_block_ids = [
            [NO_HOST_BLOCK if block == NULL_BLOCK else next(fresh) for block in table] for table in tables
        ]
        return [
            (device, host)
            for table, host_table in zip(tables, request.host_block_ids, strict=True)
            for device, host in zip(table, host_table, strict=True)
            if host != NO_HOST_BLOCK
        ]
