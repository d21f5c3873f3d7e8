"""Groups beside the one whose ranks share layers: members find one another through a store, and torch.distributed knows none of
them."""

import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from quire.config import ParallelConfig
from quire.config.engine import SharingCopies
from quire.distributed.communicator import Communicator
from quire.distributed.groups import open_group, open_store
from quire.distributed.torch_group import TIMEOUT
from quire.errors import EngineError

_PATIENCE_S = 5.0
"""Who notices that another copy has ended waits so long to be ended: who does that knows which one was the first."""


class StoreGroup(Communicator):
    """One group.

    Args:
        store: of torch's.
        device: the tensors'; decides between its own library and gloo.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._group: Any
        self._group, self._goes_through_host = open_group(store, rank, size, device, TIMEOUT)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        sent, options = self._to_send(tensor), _options("AllreduceOptions")
        self._run(lambda: self._group.allreduce([sent], options), sent, tensor)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        sent, came = self._to_send(tensor), self._to_send(out)
        self._run(lambda: self._group._allgather_base(came.flatten(0, 1), sent), came, out)

    def all_to_all(
        self, tensor: torch.Tensor, counts: Sequence[int], out: torch.Tensor, out_counts: Sequence[int]
    ) -> None:
        sent, came, options = self._to_send(tensor.contiguous()), self._to_send(out), _options("AllToAllOptions")
        self._run(lambda: self._group.alltoall_base(came, sent, list(out_counts), list(counts), options), came, out)

    def _to_send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if self._goes_through_host else tensor

    def _run(self, begin: Any, came: torch.Tensor, out: torch.Tensor) -> None:
        if self.is_silent:
            return
        begin().wait()
        if came is not out:
            out.copy_(came)

    def shutdown(self) -> None:
        self._group = None


def _options(name: str) -> Any:
    return getattr(dist, name)()


class CopiesGroup(StoreGroup):
    """The ranks of all copies of a model that share experts, one copy's after another's.

    A copy that ends breaks the group; then all copies are started again, by who started them, and meet anew.

    Args:
        ranks, rank: of this copy: how many there are, and which this is.
    """

    def __init__(self, copies: SharingCopies, ranks: int, rank: int, device: torch.device) -> None:
        number = copies.number * ranks + rank
        try:
            store = open_store(copies.rendezvous, is_host=number == 0)
            super().__init__(store, number, copies.count * ranks, device)
        except RuntimeError as error:
            _end(error)

    def _run(self, begin: Any, came: torch.Tensor, out: torch.Tensor) -> None:
        try:
            super()._run(begin, came, out)
        except RuntimeError as error:
            _end(error)


def _end(error: RuntimeError) -> NoReturn:
    threading.Event().wait(_PATIENCE_S)
    raise EngineError(f"another copy of the engine, whose experts this one needs, has ended: {error}") from None


def open_prompt_group(parallel: ParallelConfig, device: torch.device) -> StoreGroup:
    """The ranks that have the same part of each layer and share the tokens of prompts. They meet where stages would."""
    stores: Any = dist
    store = open_store(parallel.stage_rendezvous, is_host=parallel.world_rank == 0)
    place = stores.PrefixStore(f"prompts of rank {parallel.rank}", store)
    return StoreGroup(place, parallel.prompt_part, parallel.prefill_context_parallel_size, device)
