"""Configuration: resolved once into frozen dataclasses, before anything is built."""

from quire.config.cache import CacheConfig
from quire.config.device import AttentionConfig, DeviceConfig, LoadConfig
from quire.config.engine import EngineConfig
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.parallel import ParallelConfig
from quire.config.pooling import PoolingConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.structured import StructuredOutputsConfig

__all__ = [
    "AttentionConfig", "CacheConfig", "DeviceConfig", "EngineConfig", "HFConfig", "LoadConfig", "ModelConfig",
    "ObservabilityConfig", "ParallelConfig", "PoolingConfig", "SchedulerConfig", "StructuredOutputsConfig",
]  # fmt: skip
