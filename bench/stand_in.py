"""A model that is not there: an engine's settings over an executor that computes nothing, and a tokenizer for its ids."""

import json
from pathlib import Path
from typing import Any

from quire.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    HFConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)

BLOCK_SIZE = 16


def engine_config(
    name: str,
    tokenizer: Path | None,
    settings: dict[str, Any],
    scheduler: SchedulerConfig,
    num_blocks: int,
    *,
    executor: str | None = None,
    disable_log_stats: bool = False,
) -> EngineConfig:
    """A GPU's settings; text only where there is a tokenizer's folder.

    Args:
        settings: what its `config.json` would say, the vocabulary's size at least.
        executor: its class path, where the engine is to make it.
    """
    path = str(tokenizer or "")
    return EngineConfig(
        model=ModelConfig(
            model=name,
            path=path,
            hf_config=HFConfig(settings),
            tokenizer=name,
            tokenizer_path=path,
            dtype="bfloat16",
            max_model_len=scheduler.max_model_len,
            architecture="StandIn",
            eos_token_ids=(1,),
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks),
        parallel=ParallelConfig(distributed_executor_backend=executor),
        scheduler=scheduler,
        device=DeviceConfig(device="cpu"),
        load=LoadConfig(),
        attention=AttentionConfig(),
        observability=ObservabilityConfig(disable_log_stats=disable_log_stats),
        instance_id=f"bench-{name}",
    )


def byte_letters() -> list[str]:
    """The 256 bytes, as byte-level tokenizers write them."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tokenizer(folder: Path, vocabulary: dict[str, int], chat_template: str | None = None) -> Path:
    """A byte-level tokenizer with these tokens; gives its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    if chat_template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}), encoding="utf-8")
    return folder
