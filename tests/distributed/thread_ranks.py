"""Ranks that are threads of one process: what needs a communicator is tested without starting processes."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from quire.distributed.communicator import Communicator

T = TypeVar("T")


class ThreadRanks(Communicator):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, sent: dict[int, Any]) -> None:
        self.rank, self.size, self._barrier, self._sent = rank, size, barrier, sent

    def all_reduce(self, tensor: torch.Tensor) -> None:
        every = tensor.new_empty(self.size, *tensor.shape)
        self.all_gather(tensor, every)
        tensor.copy_(every.sum(0))

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        self._sent[self.rank] = tensor
        self._barrier.wait()
        out.copy_(torch.stack([self._sent[rank] for rank in range(self.size)]))
        self._barrier.wait()

    def all_to_all(self, tensor: torch.Tensor, counts: Rows[int], out: torch.Tensor, out_counts: Rows[int]) -> None:
        assert tensor.is_contiguous() and out.is_contiguous()  # as libraries want them
        self._sent[self.rank] = tensor.split(list(counts))
        self._barrier.wait()
        out.copy_(torch.cat([self._sent[rank][self.rank] for rank in range(self.size)]))
        self._barrier.wait()


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """What each rank's work gives."""
    barrier, sent = threading.Barrier(size), dict[int, Any]()
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(ThreadRanks(rank, size, barrier, sent)), range(size)))
