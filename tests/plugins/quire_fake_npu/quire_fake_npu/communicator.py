"""Ranks talk through gloo, by way of the host's memory: the device has no links of its own."""

from collections.abc import Sequence

import torch

from quire.distributed.gloo import GlooGroup


class NpuGroup(GlooGroup):
    """Processes of one host, each with a device."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if not self.is_silent:
            host = tensor.cpu()
            super().all_reduce(host)
            tensor.copy_(host)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        if not self.is_silent:
            host = torch.empty(out.shape, dtype=out.dtype)
            super().all_gather(tensor.cpu(), host)
            out.copy_(host)

    def all_to_all(
        self, tensor: torch.Tensor, counts: Sequence[int], out: torch.Tensor, out_counts: Sequence[int]
    ) -> None:
        if not self.is_silent:
            host = torch.empty(out.shape, dtype=out.dtype)
            super().all_to_all(tensor.cpu(), counts, host, out_counts)
            out.copy_(host)
