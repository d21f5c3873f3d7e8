"""An adapter in one piece of memory, as it lies on the host and on the device."""

import dataclasses
import math
from collections.abc import Mapping

import torch

from quire.kernels.adapters import AdapterPart
from quire.platforms.interface import DeviceRuntime

ALIGNMENT = 64
"""Bytes at whose multiples tensors begin."""


@dataclasses.dataclass
class Packed:
    """An adapter in one piece of memory, and its parts, which are views of it.

    Attributes:
        num_virtual: tokens that it puts before prompts. It then changes nothing but these.
        num_tokens: that its rows have.
    """

    memory: torch.Tensor
    parts: dict[str, AdapterPart]
    num_virtual: int = 0
    num_tokens: int = 0

    @classmethod
    def of(
        cls, parts: Mapping[str, AdapterPart], num_virtual: int, num_tokens: int, runtime: DeviceRuntime
    ) -> "Packed":
        """A copy in memory that the device can read fast."""
        size = sum(padded(tensor.nbytes) for part in parts.values() for tensor in tensors_of_part(part).values())
        memory = runtime.pinned(torch.empty(size, dtype=torch.uint8))
        packed = cls(memory, dict(parts), num_virtual, num_tokens).viewed_in(memory)
        for name, part in parts.items():
            for field, tensor in tensors_of_part(part).items():
                getattr(packed.parts[name], field).copy_(tensor)
        return packed

    def viewed_in(self, memory: torch.Tensor) -> "Packed":
        """The same parts as views of a copy of the memory."""
        at, viewed = 0, dict[str, AdapterPart]()
        for name, part in self.parts.items():
            views: dict[str, torch.Tensor] = {}
            for field, tensor in tensors_of_part(part).items():
                views[field] = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                at += padded(tensor.nbytes)
            viewed[name] = dataclasses.replace(part, **views)
        return dataclasses.replace(self, memory=memory, parts=viewed)


def tensors_of_part(part: AdapterPart) -> dict[str, torch.Tensor]:
    """By the names of its fields."""
    return {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}


def padded(num_bytes: int) -> int:
    """Bytes up to the next tensor."""
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT
