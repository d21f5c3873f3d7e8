"""Ray, where it is installed: connecting to its cluster. Importing this module does not import Ray."""

import importlib
import importlib.util
from typing import Any

from quire.config import ParallelConfig
from quire.errors import ConfigError
from quire.extras import install_command
from quire.logger import init_logger

logger = init_logger(__name__)


def initialize_ray_cluster(parallel_config: ParallelConfig, ray_address: str | None = None) -> Any:
    """Connect this process to a Ray cluster, or start a local one; returns Ray's own description of it.

    Args:
        parallel_config: what the engine needs; the cluster must have a device or a CPU for each worker.
        ray_address: the cluster's address; None means the environment's, or a new local cluster.

    Raises:
        ConfigError: Ray is not installed, cannot be reached, or has too few resources.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "distributed_executor_backend='ray' needs the package 'ray', which is not installed; install it with "
            f"`{install_command('ray')}`",
            setting="distributed_executor_backend",
        )
    ray: Any = importlib.import_module("ray")
    try:
        context = ray.init(address=ray_address, ignore_reinit_error=True, log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the Ray cluster at {ray_address or 'the default address'} cannot be used: {error}",
            setting="distributed_executor_backend",
        ) from error
    resources: dict[str, float] = ray.cluster_resources()
    workers = max(resources.get("GPU", 0.0), resources.get("CPU", 0.0))
    if parallel_config.world_size > workers:
        raise ConfigError(
            f"world size {parallel_config.world_size} (tensor_parallel_size={parallel_config.tensor_parallel_size} times "
            f"pipeline_parallel_size={parallel_config.pipeline_parallel_size}) needs as many devices, but the Ray cluster "
            f"has {workers:g}",
            setting="tensor_parallel_size",
        )
    logger.info("Connected to a Ray cluster with %s", resources)
    return context
