"""Ranks that talk through torch.distributed: joining and leaving a group, its plain sums and exchanges.

Knows one group of ranks. They find one another through a file; or somebody else has started them (torchrun), and has perhaps
joined all processes to a group already, of which they are a part then.
"""

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from quire.distributed.communicator import Communicator

LAUNCHED = "env://"
TIMEOUT = datetime.timedelta(minutes=10)
"""Ranks load at different speeds; one that has died is noticed by its parent long before this."""


class TorchGroup(Communicator):
    """One tensor-parallel group.

    Args:
        backend: torch's name of the library: `gloo` or `nccl`.
        address: where the ranks meet: an address of `init_process_group`, the same for all of them. `LAUNCHED`: as the launcher
            says; ranks follow one another in its numbers.
        device: the rank's own, for libraries that tie a group to one.
    """

    def __init__(self, backend: str, rank: int, size: int, address: str, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self.group: dist.ProcessGroup | None = None
        self._is_open, self._is_all = True, True
        if address == LAUNCHED:
            self._join_launched(backend, device)
        else:
            dist.init_process_group(
                backend, init_method=address, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device
            )

    def _join_launched(self, backend: str, device: torch.device | None) -> None:
        self._is_all = not dist.is_initialized()
        if self._is_all:
            dist.init_process_group(backend, init_method=LAUNCHED, timeout=TIMEOUT, device_id=device)
        for first in range(0, dist.get_world_size(), self.size):  # all make all groups, in the same order
            ranks = list(range(first, first + self.size))
            group = dist.new_group(ranks, timeout=TIMEOUT, backend=backend)
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self.group = group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if not self.is_silent:
            dist.all_reduce(tensor, group=self.group)

    def all_to_all(
        self, tensor: torch.Tensor, counts: Sequence[int], out: torch.Tensor, out_counts: Sequence[int]
    ) -> None:
        if not self.is_silent:
            dist.all_to_all_single(out, tensor, list(out_counts), list(counts), group=self.group)

    def shutdown(self) -> None:
        if self._is_open:
            self._is_open = False
            dist.destroy_process_group(None if self._is_all else self.group)
