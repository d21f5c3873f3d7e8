"""Configuration: resolved once into frozen dataclasses, before anything is built."""

from quire.config.engine import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    LoRAConfig,
    ParallelConfig,
    SchedulerConfig,
)
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.multimodal import MultiModalConfig
from quire.config.observability import ObservabilityConfig, ProfilerConfig, StructuredOutputsConfig
from quire.config.pooling import PoolerConfig, PoolingConfig

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "HFConfig",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PoolerConfig",
    "PoolingConfig",
    "ProfilerConfig",
    "SchedulerConfig",
    "StructuredOutputsConfig",
]
