"""What a rank asks of the others: sums, gathers and exchanges of tensors. A platform says which communicator its ranks use."""

import abc
import contextlib
from collections.abc import Iterator, Sequence

import torch


class Communicator(abc.ABC):
    """The ranks of one tensor-parallel group. Every rank must make the same calls in the same order.

    Attributes:
        is_silent: nothing is sent and tensors stay as they are: for rehearsals, which not every rank needs.
        copies: the ranks of all copies of the model, where they share experts.
        prompts: the ranks that share the tokens of prompts, where there are some.
    """

    size: int
    rank: int
    is_silent: bool = False
    copies: "Communicator | None" = None
    prompts: "Communicator | None" = None

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place; every rank gets the same bits."""

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """out[r] = rank r's tensor; `out` has one more dimension, of `size`, in front. The tensor may be `out[rank]` itself."""

    def all_to_all(
        self, tensor: torch.Tensor, counts: Sequence[int], out: torch.Tensor, out_counts: Sequence[int]
    ) -> None:
        """Rows of `tensor` go to the ranks in their order, counts[r] of them to rank r; `out` gets out_counts[r] rows of rank r.
        Needed where the platform claims `token_exchange`."""
        raise NotImplementedError(f"{type(self).__name__} has no all_to_all")

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """For a rehearsal."""
        groups = [self] if self.prompts is None else [self, self.prompts]
        for group in groups:
            group.is_silent = True
        try:
            yield
        finally:
            for group in groups:
                group.is_silent = False

    def suspend(self) -> None:
        """The engine falls asleep: give buffers back that only calls need. May be called twice."""

    def resume(self) -> None:
        """It wakes up; calls follow. May be called twice."""

    def shutdown(self) -> None:
        """Leave the group; may be called twice."""


class SingleRank(Communicator):
    """One rank alone: nothing to say."""

    size, rank = 1, 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        out[0].copy_(tensor)
