"""How many devices, and who runs the workers."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout.

    Attributes:
        enable_expert_parallel: the workers that share a model have each some of its experts whole, not all of them in part.
        distributed_executor_backend: None (in-process for one worker, else `mp`), `uni`, `mp` (a process a device), or a class.
        rank: which of the workers this is; set by whoever starts them.
        rendezvous: the address where the workers meet; set with the rank.
    """

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | type[Any] | None = None
    worker_cls: str = "auto"
    disable_custom_all_reduce: bool = False
    max_parallel_loading_workers: int | None = None
    ray_workers_use_nsight: bool = False
    placement_group: Any = None
    rank: int = 0
    rendezvous: str = ""

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.pipeline_parallel_size * self.tensor_parallel_size
