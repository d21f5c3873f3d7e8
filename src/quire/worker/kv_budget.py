"""How many bytes the KV cache gets: one rule, for the worker that allocates and for the explanation that does not.

Knows sizes and settings. Asks no device.
"""

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, cross_group, cross_pages, group_layers
from quire.core.kv_planner import blocks_for_one_request
from quire.errors import Explained


def compute_kv_bytes(
    config: EngineConfig, free: int, buffers: int, specs: list[KVCacheSpec], cap: Explained[int] | None
) -> int:
    """The size that the user named, or a share of what is free beside the weights, less the buffers; 0 or less is a refusal.

    Args:
        free: bytes that are free once the weights are there.
        buffers: bytes that will be touched later, and are not the cache's.
        cap: what the platform lets the cache have when no size is named; a request of full length may have more.
    """
    named = config.cache.kv_cache_memory_bytes
    if named is not None:
        return named
    available = int(free * config.cache.gpu_memory_utilization) - buffers
    if cap is None:
        return available
    return min(available, max(cap.value, longest_request_bytes(config, specs)))


def longest_request_bytes(config: EngineConfig, specs: list[KVCacheSpec]) -> int:
    """What one request of the full context length needs."""
    groups = group_layers(specs)
    blocks = blocks_for_one_request(groups, config.model.max_model_len, config.scheduler.max_open_tokens)
    cross = cross_group(specs)
    read = 0 if cross is None else (1 + cross_pages(cross)) * cross.page_bytes
    return blocks * KVCacheConfig(num_blocks=blocks, groups=groups).page_bytes + read
