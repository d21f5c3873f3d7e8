"""Configurations, folders and requests that the engine's tests share."""

import json
from pathlib import Path
from typing import Any

from tests.oracles.tiny_tokenizers import write_tokenizer

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
from quire.engine.input_processor import InputProcessor
from quire.engine.request_record import RequestRecord
from quire.engine.tokenizer_source import TokenizerSource
from quire.sampling_params import SamplingParams
from quire.tokenizers.interface import Tokenizer

HASH_EXECUTOR = "tests.oracles.hash_model:HashExecutor"
ENDLESS = 100_000
"""Tokens of a request that no test sees the end of: it is still there, whatever the test does first and however slowly."""
ROOM = {"max_model_len": 2 * ENDLESS, "num_blocks": 60_000}
"""Settings of an engine that takes such requests."""


def make_config(
    folder: Path | None = None,
    *,
    vocab_size: int = 512,
    max_model_len: int = 256,
    max_logprobs: int = 20,
    eos_token_ids: tuple[int, ...] = (),
    default_sampling: dict[str, Any] | None = None,
    num_blocks: int = 256,
    executor: Any = HASH_EXECUTOR,
    device: str = "cpu",
    recovery: bool | None = None,
    **scheduler: Any,
) -> EngineConfig:
    """An engine over the hash model; with a tokenizer if `folder` holds one."""
    path = str(folder) if folder is not None else ""
    return EngineConfig(
        model=ModelConfig(
            model="hash",
            path=path,
            hf_config=HFConfig({"vocab_size": vocab_size}),
            tokenizer="hash",
            tokenizer_path=path,
            dtype="float32",
            max_model_len=max_model_len,
            architecture="HashModel",
            eos_token_ids=eos_token_ids,
            max_logprobs=max_logprobs,
            default_sampling=default_sampling or {},
        ),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=num_blocks),
        parallel=ParallelConfig(distributed_executor_backend=executor, recovery=recovery),
        scheduler=SchedulerConfig(max_model_len=max_model_len, **{"max_num_seqs": 64, **scheduler}),
        device=DeviceConfig(device=device),
        load=LoadConfig(),
        attention=AttentionConfig(),
        observability=ObservabilityConfig(disable_log_stats=True),
        instance_id="test",
    )


def write_model_folder(folder: Path, vocab_size: int = 512) -> Path:
    """A folder with a tokenizer and a config.json."""
    write_tokenizer(folder, "byte_level")
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return folder


def process(
    config: EngineConfig, prompt: Any, params: SamplingParams, request_id: str = "r", **options: Any
) -> RequestRecord:
    """One request through a fresh input processor."""
    processor = InputProcessor(config, TokenizerSource(config.model), **options)
    return processor.process(request_id, processor.tokenize(prompt), params)


def make_record(record: RequestRecord, tokenizer: Tokenizer | None) -> RequestRecord:
    """The record that the engine would keep."""
    record.tokenizer = tokenizer
    record.begin()
    return record
