"""From what each layer keeps and the bytes there are to how many pages there will be, or a refusal that tells the way out.

Knows bytes, pages and limits. Allocates nothing.
"""

from collections.abc import Callable

from quire.config import CacheConfig, SchedulerConfig
from quire.config.kv_spec import (
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVKind,
    cross_group,
    cross_pages,
    group_layers,
)
from quire.core.kv_groups import group_rules
from quire.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20


def plan_kv_cache(
    specs: list[KVCacheSpec],
    available_bytes: int,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    max_model_len: int | None = None,
    group: Callable[[list[KVCacheSpec]], tuple[KVCacheGroup, ...]] = group_layers,
) -> KVCacheConfig:
    """Divide the memory into pages. Those of cross attention are for as many requests as the others', if each is as long as it
    may be.

    Args:
        specs: one a layer.
        available_bytes: what the executor has for pages; `kv_cache_memory_bytes` and `num_gpu_blocks_override` win.
        max_model_len: tokens a request may have in all; by default the scheduler's.
        group: which layers share a page table (`Platform.kv_groups`).

    Raises:
        ConfigError: no layers, unequal page sizes, or less room than one request of `max_model_len` tokens needs; the
            message tells the largest `max_model_len` that fits and the memory that would do.
    """
    length = max_model_len or scheduler.max_model_len
    _check_specs(specs)
    groups = group(specs)
    _check_groups(groups, specs)
    page_bytes = KVCacheConfig(num_blocks=0, groups=groups).page_bytes
    budget = available_bytes if cache.kv_cache_memory_bytes is None else cache.kv_cache_memory_bytes
    needed = blocks_for_one_request(groups, length, scheduler.max_open_tokens)
    override = cache.num_gpu_blocks_override
    cross, num_cross_blocks = cross_group(specs), 0
    if cross is not None:
        longest = (needed - 1) * page_bytes + cross_pages(cross) * cross.page_bytes
        requests = budget // longest if override is None else override // needed
        num_cross_blocks = 1 + cross_pages(cross) * max(1, min(requests, scheduler.max_num_seqs))
    kept = 0 if cross is None else num_cross_blocks * cross.page_bytes
    num_blocks = max(0, budget - kept) // page_bytes if override is None else override
    if num_blocks < needed:
        raise _too_small(groups, num_blocks, needed, page_bytes, length, cache, scheduler, kept)
    return KVCacheConfig(
        num_blocks=num_blocks,
        groups=groups,
        num_host_blocks=int(cache.swap_space * GIB) // page_bytes,
        cross=cross,
        num_cross_blocks=num_cross_blocks,
    )


def blocks_for_one_request(groups: tuple[KVCacheGroup, ...], max_model_len: int, max_open_tokens: int) -> int:
    """Pages, the null page included, with which one request of `max_model_len` tokens can run. Its last token is sampled,
    never computed."""
    tokens = max(1, max_model_len - 1)
    return 1 + sum(group_rules(group).peak_blocks(tokens, max_open_tokens) for group in groups)


def largest_model_len(groups: tuple[KVCacheGroup, ...], num_blocks: int, max_open_tokens: int, limit: int) -> int:
    """The largest `max_model_len` up to `limit` that `num_blocks` pages can serve; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for_one_request(groups, middle, max_open_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low if low > 1 else 0


def _check_specs(specs: list[KVCacheSpec]) -> None:
    if not specs:
        raise ConfigError("the model has no layer that keeps a KV cache")
    sizes = sorted({spec.block_size for spec in specs})
    if len(sizes) > 1 or sizes[0] < 1:
        raise ConfigError(
            f"all layers must have one positive page size; these have {sizes} tokens", setting="block_size"
        )


def _check_groups(groups: tuple[KVCacheGroup, ...], specs: list[KVCacheSpec]) -> None:
    layers = sorted(layer for group in groups for layer in group.layers)
    if layers != [layer for layer, spec in enumerate(specs) if spec.kind is not KVKind.CROSS]:
        raise ConfigError(
            f"the platform's kv_groups() gave groups of layers {layers}; each of {len(specs)} layers must be in one group",
            setting="device",
        )


def _too_small(
    groups: tuple[KVCacheGroup, ...],
    num_blocks: int,
    needed: int,
    page_bytes: int,
    length: int,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    kept: int,
) -> ConfigError:
    """The refusal, with the numbers and each setting that would help."""
    fits = largest_model_len(groups, num_blocks, scheduler.max_open_tokens, length)
    if cache.num_gpu_blocks_override is not None:
        remedy = f"raise num_gpu_blocks_override to at least {needed}"
        setting = "num_gpu_blocks_override"
    else:
        remedy = (
            f"give the cache at least {(needed * page_bytes + kept) / MIB:.1f} MiB "
            f"(kv_cache_memory_bytes={needed * page_bytes + kept}"
        )
        remedy += ")" if cache.kv_cache_memory_bytes is not None else ", or a higher gpu_memory_utilization)"
        setting = "max_model_len"
    shorter = f"lower max_model_len to {fits} or less, or " if fits else ""
    return ConfigError(
        f"max_model_len is {length}: one such request needs {needed} KV-cache pages of {page_bytes} bytes "
        f"({needed * page_bytes / MIB:.1f} MiB), and there is room for {num_blocks} "
        f"({num_blocks * page_bytes / MIB:.1f} MiB); {shorter}{remedy}",
        setting=setting,
    )
