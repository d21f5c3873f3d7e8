"""Which executor runs the steps, by `distributed_executor_backend`. Importing it loads no torch."""

from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.interface import Executor
from quire.platforms import current_platform
from quire.plugins import load_general_plugins
from quire.plugins.registry import import_class
from quire.timeline import STARTUP

SETTING = "distributed_executor_backend"
BUILT_IN = {
    "uni": "quire.executor.uniproc:UniprocExecutor",
    "mp": "quire.executor.multiproc:MultiprocExecutor",
    "ray": "quire.executor.ray_executor:RayExecutor",
    "external_launcher": "quire.executor.launched:LaunchedExecutor",
}


def make_executor(config: EngineConfig) -> Executor:
    """The executor of a configuration; it loads the model.

    Raises:
        ConfigError: a backend that is unknown, is not available, or is no Executor.
    """
    return executor_class(config)(config)


def executor_class(config: EngineConfig) -> type[Executor]:
    """The class behind the setting: None means this process for one worker, a process each for more, on as many hosts as there
    are nodes; a class or its path is taken as it is."""
    backend, size = config.parallel.distributed_executor_backend, config.parallel.world_size
    if config.parallel.nnodes > 1 and backend in (None, "mp"):
        backend = "quire.executor.node_executor:NodeExecutor"
    if backend is None:
        backend = "uni" if size == 1 else "mp"
    if backend == "uni" and size > 1:
        raise ConfigError(
            f"{SETTING}='uni' runs one worker, but tensor_parallel_size={config.parallel.tensor_parallel_size} and "
            f"pipeline_parallel_size={config.parallel.pipeline_parallel_size} need {size}: leave it out, or use 'mp'",
            setting=SETTING,
        )
    if isinstance(backend, str):
        backend = BUILT_IN.get(backend, backend)
    if not isinstance(backend, str) or "." in backend or ":" in backend:
        return import_class(backend, SETTING, Executor)
    raise ConfigError(
        f"{SETTING}={backend!r} is unknown: use None, 'uni' (in this process), 'mp' (a process a device), 'ray', "
        "'external_launcher' or a class path",
        setting=SETTING,
    )


def make_worker(config: EngineConfig) -> Any:
    """The platform's worker, or the one that `worker_cls` names, with the model loaded."""
    load_general_plugins("worker")
    platform = current_platform(config.device.device)
    platform.begin_start(config)
    path = config.parallel.worker_cls
    with STARTUP.phase("imports"):
        worker_class = import_class(platform.worker_class() if path == "auto" else path, "worker_cls")
    worker = worker_class(config, platform)
    worker.load_model()
    return worker
