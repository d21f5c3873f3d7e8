"""One rank of several processes that somebody else has started, each with the whole engine: torchrun, or a trainer.

All processes are given the same requests in the same order. They plan the same steps because nothing in a plan depends on time:
what a request needs is prepared at once, and pages are as many as fit into the rank with the least memory. Knows the variables of
the launcher.
"""

import concurrent.futures
import dataclasses

from quire import envs
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.uniproc import UniprocExecutor
from quire.request import EngineRequest

SETTING = "distributed_executor_backend"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHED = "env://"
"""Where ranks meet: as the launcher says."""


def place_of_rank(config: EngineConfig) -> EngineConfig:
    """The configuration with this process's place among those that were launched.

    Raises:
        ConfigError: nobody has launched it so, or the numbers do not fit, or something in a plan would depend on time.
    """
    values = {name: envs.foreign(name) for name in _NAMES}
    if missing := [name for name, value in values.items() if not value]:
        text = f"{SETTING}='external_launcher' needs the variables of torchrun, and {', '.join(missing)} is not set"
        raise ConfigError(f"{text}: start this program with torchrun", setting=SETTING)
    _refuse_what_depends_on_time(config)
    size, count, local = (
        config.parallel.tensor_parallel_size,
        int(values["WORLD_SIZE"] or 0),
        int(values["LOCAL_RANK"] or 0),
    )
    if count % size or int(values["RANK"] or 0) % size != local % size:
        text = f"tensor_parallel_size={size} does not divide the launcher's {count} processes, or those of a host"
        raise ConfigError(text, setting="tensor_parallel_size")
    place = {"rank": local % size, "data_parallel_rank": local // size, "rendezvous": LAUNCHED}
    parallel = dataclasses.replace(config.parallel, disable_custom_all_reduce=True, **place)
    return dataclasses.replace(config, parallel=parallel)


def _refuse_what_depends_on_time(config: EngineConfig) -> None:
    refused = {
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size > 1,
        "speculative_config": config.speculative is not None,
        "enable_lora": config.lora is not None,
        "kv_transfer_config": config.kv_transfer is not None,
    }
    for setting, is_asked in refused.items():
        if is_asked:
            raise ConfigError(f"{setting} does not go with {SETTING}='external_launcher' yet", setting=setting)


class LaunchedExecutor(UniprocExecutor):
    """Runs steps on the rank that this process is.

    Raises:
        ConfigError: as `place_of_rank`.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(place_of_rank(config))

    def available_kv_bytes(self) -> int:
        return self._worker.least_of_ranks(super().available_kv_bytes())

    def is_prepared(self, request: EngineRequest) -> bool:
        if not super().is_prepared(request):
            concurrent.futures.wait([self._worker.prepare(request.sampling_params)])
        return True

    def idle(self) -> bool:
        return False  # the others may be busy
