"""How the stages of a pipeline hand named tensors to one another: what one sends, the next one receives in its own buffers.

A platform says which link its workers use (`Platform.stage_link_class`). Knows the stages of one place in the tensor-parallel
groups; knows nothing of models.
"""

import abc
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from quire.config import ParallelConfig
from quire.distributed.groups import open_group, open_store
from quire.distributed.torch_group import LAUNCHED, TIMEOUT

KEPT = 64
"""Messages that stay on a board: stages are fewer steps apart than that, as each step passes through all of them."""


class StageLink(abc.ABC):
    """One worker's link to the stages before and behind its own. Both sides of a link name the same tensors, of the same shapes
    and types. Called in the worker's thread, never within what is recorded.

    Args:
        parallel: has the worker's stage and rank, and where stages meet.
        device: the worker's.
    """

    @abc.abstractmethod
    def __init__(self, parallel: ParallelConfig, device: torch.device) -> None: ...

    @abc.abstractmethod
    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hand tensors to the next stage. They may be written again at once; the call may wait for earlier ones only."""

    @abc.abstractmethod
    def receive(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors with what the stage before has sent first of what was not received yet."""

    def shutdown(self) -> None:
        """Leave; may be called twice."""


class TorchLink(StageLink):
    """Point to point, through the device's library or gloo (`distributed/groups.py`)."""

    def __init__(self, parallel: ParallelConfig, device: torch.device) -> None:
        self._stage, self._most = parallel.stage, parallel.pipeline_parallel_size
        stores: Any = dist
        store = open_store(parallel.stage_rendezvous, is_host=parallel.world_rank == 0)
        place = stores.PrefixStore(f"stages of rank {parallel.rank} of copy {parallel.copy_number}", store)
        self._group: Any
        self._group, self._goes_through_host = open_group(place, self._stage, self._most, device, TIMEOUT)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            copy = tensor.cpu() if self._goes_through_host else tensor.contiguous().clone()
            self._sent.append((self._group.send([copy], self._stage + 1, 0), copy))
        while len(self._sent) > self._most * len(tensors):  # as many steps as are in flight
            self._sent.popleft()[0].wait()

    def receive(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            is_direct = tensor.is_contiguous() and not self._goes_through_host
            kind = torch.device("cpu") if self._goes_through_host else tensor.device
            arrived = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype, device=kind)
            self._group.recv([arrived], self._stage - 1, 0).wait()
            if arrived is not tensor:
                tensor.copy_(arrived)

    def shutdown(self) -> None:
        self._sent.clear()
        self._group = None


class StageBoard:
    """What the stages of one copy, which a launcher has started, tell one another, in the order in which all of them call."""

    def __init__(self, parallel: ParallelConfig) -> None:
        stores: Any = dist
        store = open_store(LAUNCHED, is_host=False)
        self._store = stores.PrefixStore(f"told by stages of copy {parallel.copy_number}", store)
        self._stage, self._is_first, self._calls = parallel.stage, parallel.rank == 0, 0

    def tell(self, message: bytes, stages: range) -> list[bytes]:
        """What each of these stages tells, of which this may be one; of several ranks, the first."""
        self._calls += 1
        if self._stage in stages and self._is_first:
            self._store.set(f"{self._calls} {self._stage}", message)
            self._store.delete_key(f"{self._calls - KEPT} {self._stage}")
        return [self._store.get(f"{self._calls} {each}") for each in stages]
