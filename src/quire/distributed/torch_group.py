"""Ranks that talk through torch.distributed: joining and leaving a group, and its plain sums and gathers.

Knows one group of ranks. They find one another through a file.
"""

import datetime

import torch
import torch.distributed as dist

from quire.distributed.communicator import Communicator

TIMEOUT = datetime.timedelta(minutes=10)
"""Ranks load at different speeds; one that has died is noticed by its parent long before this."""


class TorchGroup(Communicator):
    """One tensor-parallel group.

    Args:
        backend: torch's name of the library: `gloo` or `nccl`.
        address: where the ranks meet: an address of `init_process_group`, the same for all of them.
        device: the rank's own, for libraries that tie a group to one.
    """

    def __init__(self, backend: str, rank: int, size: int, address: str, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        dist.init_process_group(
            backend, init_method=address, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device
        )
        self._is_open = True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if not self.is_silent:
            dist.all_reduce(tensor)

    def shutdown(self) -> None:
        if self._is_open:
            self._is_open = False
            dist.destroy_process_group()
