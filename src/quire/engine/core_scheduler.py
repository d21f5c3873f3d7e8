"""The scheduler of an engine core, with the parts that its configuration asks for."""

from typing import Any

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.config.kv_transfer import KV_CONNECTORS
from quire.core.encoding import Encoding
from quire.core.preparations import Preparations
from quire.core.scheduler import Scheduler
from quire.executor.interface import Executor
from quire.plugins.registry import import_class


def make_scheduler(
    config: EngineConfig, kv_cache: KVCacheConfig, executor: Executor, preparations: Preparations
) -> Scheduler:
    """Raises ConfigError: a part cannot be had with this model or these settings."""
    scheduler_class: Any = import_class(config.scheduler.scheduler_cls or Scheduler, "scheduler_cls")
    scheduler = scheduler_class(config.scheduler, config.cache, kv_cache, max_model_len=config.model.max_model_len)
    scheduler.waiting.preparations = preparations
    if config.speculative is not None:
        scheduler.speculate(config.speculative)
    if config.multimodal is not None:
        takes_embeds = config.multimodal.prompt_embeds or config.multimodal.mm_embeds
        widths: dict[str, int] = executor.collective_rpc("embeds_widths")[0] if takes_embeds else {}
        pages = (kv_cache.num_cross_blocks - 1, kv_cache.block_size) if kv_cache.cross is not None else None
        most_whole = config.scheduler.max_num_batched_tokens - config.scheduler.max_num_seqs
        scheduler.encoding = Encoding(config.multimodal, widths, pages, most_whole, executor.encodes_beside())
    if config.kv_transfer is not None:
        halves = KV_CONNECTORS[config.kv_transfer.kv_connector]
        scheduler.connect(import_class(halves.scheduler, "kv_transfer_config")(config, kv_cache))
    return scheduler
