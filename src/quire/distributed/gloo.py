"""Ranks on CPUs, through gloo. Knows host tensors only."""

import torch
import torch.distributed as dist

from quire.distributed.torch_group import TorchGroup


class GlooGroup(TorchGroup):
    """Processes of one host, each with a share of its cores."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        super().__init__("gloo", rank, size, address)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        if not self.is_silent:
            dist.all_gather(list(out.unbind(0)), tensor, group=self.group)
