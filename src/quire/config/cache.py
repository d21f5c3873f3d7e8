"""Where keys and values live, and how much room they get."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """KV-cache settings.

    Attributes:
        block_size: tokens a page. `is_block_size_given`: the user said so; otherwise a model whose layers keep states may
            have longer ones.
        gpu_memory_utilization: share of the device's memory that the engine may use (on a CPU, of the host's free memory).
        kv_cache_memory_bytes: an explicit size for the cache; overrides the share.
        num_gpu_blocks_override: an explicit number of pages; overrides both.
        swap_space: GiB of host memory for swapped pages.
        cache_dtype: `auto` (the model's) or a torch dtype name.
    """

    block_size: int = 16
    is_block_size_given: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space: float = 0.0
    cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "blake2b"
    sliding_window: int | None = None
    cpu_offload_gb: float = 0.0
    enable_kv_events: bool = False
