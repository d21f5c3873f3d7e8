"""Configuration: resolved once into frozen dataclasses, before anything is built."""

from quire.config.engine import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ParallelConfig,
    SchedulerConfig,
)
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig, StructuredOutputsConfig
from quire.config.pooling import PoolingConfig

__all__ = [
    "AttentionConfig", "CacheConfig", "DeviceConfig", "EngineConfig", "HFConfig", "LoadConfig", "ModelConfig",
    "ObservabilityConfig", "ParallelConfig", "PoolingConfig", "SchedulerConfig", "StructuredOutputsConfig",
]  # fmt: skip
