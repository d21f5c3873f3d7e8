"""One rank of several processes that somebody else has started, each with the whole engine: torchrun, or a trainer.

All processes of one copy are given the same requests in the same order. They plan the same steps because nothing in a plan
depends on time: what a request needs is prepared at once, and pages are as many as fit into the rank with the least memory.
Stages tell one another of their layers, and the last one of its tokens. Knows the variables of the launcher.
"""

import concurrent.futures
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.codec import decoder, encode
from quire.config import EngineConfig, ParallelConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.output import ModelRunnerOutput
from quire.errors import ConfigError
from quire.executor.uniproc import UniprocExecutor
from quire.request import EngineRequest

if TYPE_CHECKING:
    from quire.distributed.stage_link import StageBoard

SETTING = "distributed_executor_backend"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHED = "env://"
"""Where ranks meet: as the launcher says."""


def place_of_rank(config: EngineConfig) -> EngineConfig:
    """The configuration with this process's place among those that were launched: copies one after another, of each its stages,
    of each stage its ranks.

    Raises:
        ConfigError: nobody has launched it so, or the numbers do not fit, or something in a plan would depend on time.
    """
    values = {name: envs.foreign(name) for name in _NAMES}
    if missing := [name for name, value in values.items() if not value]:
        text = f"{SETTING}='external_launcher' needs the variables of torchrun, and {', '.join(missing)} is not set"
        raise ConfigError(f"{text}: start this program with torchrun", setting=SETTING)
    _refuse_what_depends_on_time(config)
    parallel = config.parallel
    size, copies = parallel.world_size, parallel.copies_everywhere
    rank, count, local = (int(values[name] or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    ranks = f"tensor_parallel_size={parallel.tensor_parallel_size}"
    if parallel.pipeline_parallel_size > 1:
        ranks += f" times pipeline_parallel_size={parallel.pipeline_parallel_size}"
    if count % size or rank % size != local % size:
        text = f"{ranks} does not divide the launcher's {count} processes, or those of a host"
        raise ConfigError(text, setting="tensor_parallel_size")
    if copies > 1 and count != copies * size:
        text = f"data_parallel_size={copies} times {ranks} is not the launcher's {count} processes"
        raise ConfigError(text, setting="data_parallel_size")
    stage, place = divmod(rank % size, parallel.tensor_parallel_size)
    placed = dataclasses.replace(
        parallel,
        disable_custom_all_reduce=True,
        rank=place,
        stage=stage,
        data_parallel_rank=local // size,
        data_parallel_start=rank // size - local // size,
        rendezvous=LAUNCHED,
        stage_rendezvous=LAUNCHED,
    )
    return dataclasses.replace(config, parallel=placed)


def _refuse_what_depends_on_time(config: EngineConfig) -> None:
    refused = {
        "speculative_config": config.speculative is not None,
        "enable_lora": config.lora is not None,
        "kv_transfer_config": config.kv_transfer is not None,
    }
    for setting, is_asked in refused.items():
        if is_asked:
            raise ConfigError(f"{setting} does not go with {SETTING}='external_launcher' yet", setting=setting)


def _board(parallel: ParallelConfig) -> "StageBoard":
    from quire.distributed.stage_link import StageBoard  # which imports torch

    return StageBoard(parallel)


class LaunchedExecutor(UniprocExecutor):
    """Runs steps on the rank that this process is.

    Raises:
        ConfigError: as `place_of_rank`.
    """

    def __init__(self, config: EngineConfig) -> None:
        config = place_of_rank(config)
        super().__init__(config)
        self._parallel = config.parallel
        self._all = range(config.parallel.pipeline_parallel_size)
        self._stages = _board(config.parallel) if len(self._all) > 1 else None
        self._layer_ends = [0]

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        own = super().kv_cache_specs()
        if self._stages is None:
            return own
        parts = self._tell(own, self._all, list[KVCacheSpec])
        self._layer_ends = [0, *itertools.accumulate(map(len, parts))]
        return [spec for part in parts for spec in part]

    def available_kv_bytes(self) -> int:
        least = self._worker.least_of_ranks(super().available_kv_bytes())
        if self._stages is None:
            return least
        specs = self.kv_cache_specs()
        sizes = [
            sum(spec.page_bytes for spec in specs[start:end]) for start, end in itertools.pairwise(self._layer_ends)
        ]
        told = self._tell(least, self._all, int)
        return min(num_bytes * sum(sizes) // size for num_bytes, size in zip(told, sizes, strict=True))

    def initialize(self, kv_cache: KVCacheConfig) -> None:
        ends = self._layer_ends[self._parallel.stage :][:2]
        super().initialize(kv_cache if self._stages is None else kv_cache.of_layers(range(*ends)))

    def collect(self) -> ModelRunnerOutput:
        output = super().collect()
        if self._stages is None:
            return output
        (told,) = self._tell(output, self._all[-1:], ModelRunnerOutput)
        return output if self._parallel.is_last_stage else told

    def _tell(self, value: Any, stages: range, kind: Any) -> list[Any]:
        """What each of these stages, of which this may be one, gives; of this type."""
        assert self._stages is not None
        return [decoder(kind)(told) for told in self._stages.tell(encode(value), stages)]

    def is_prepared(self, request: EngineRequest) -> bool:
        if not super().is_prepared(request):
            concurrent.futures.wait([self._worker.prepare(request.sampling_params)])
        return True

    def idle(self) -> bool:
        return False  # the others may be busy
