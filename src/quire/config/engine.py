"""The one frozen configuration of an engine; built once by `EngineArgs.create_engine_config`, read by every floor above."""

import dataclasses

from quire.config.cache import CacheConfig
from quire.config.device import AttentionConfig, DeviceConfig, LoadConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.parallel import ParallelConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.structured import StructuredOutputsConfig


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Everything that was decided before anything is built.

    Attributes:
        instance_id: a short random id, in logs and metrics.
        provenance: for settings that were derived, `"scheduler.max_num_seqs" -> "why"`; `quire explain` prints it.
    """

    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    load: LoadConfig
    attention: AttentionConfig
    observability: ObservabilityConfig
    structured_outputs: StructuredOutputsConfig = dataclasses.field(default_factory=StructuredOutputsConfig)
    instance_id: str = ""
    provenance: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
