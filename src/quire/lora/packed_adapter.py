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
        head: tensors of a pooling model's head that are the adapter's own.
    """

    memory: torch.Tensor
    parts: dict[str, AdapterPart]
    num_virtual: int = 0
    num_tokens: int = 0
    head: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict[str, torch.Tensor])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them, as they lie in memory."""
        return [each for part in self.parts.values() for each in tensors_of_part(part).values()] + [*self.head.values()]

    def packed(self, runtime: DeviceRuntime) -> "Packed":
        """A copy in one piece of memory that the device can read fast."""
        size = sum(padded(tensor.nbytes) for tensor in self.tensors)
        copy = self.viewed_in(runtime.pinned(torch.empty(size, dtype=torch.uint8)))
        for place, tensor in zip(copy.tensors, self.tensors, strict=True):
            place.copy_(tensor)
        return copy

    def viewed_in(self, memory: torch.Tensor) -> "Packed":
        """The same parts as views of a copy of the memory."""
        at, views = 0, list[torch.Tensor]()
        for tensor in self.tensors:
            views.append(memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += padded(tensor.nbytes)
        following = iter(views)
        parts = {
            name: dataclasses.replace(part, **{field: next(following) for field in tensors_of_part(part)})
            for name, part in self.parts.items()
        }
        return dataclasses.replace(self, memory=memory, parts=parts, head={name: next(following) for name in self.head})


def tensors_of_part(part: AdapterPart) -> dict[str, torch.Tensor]:
    """By the names of its fields."""
    return {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}


def padded(num_bytes: int) -> int:
    """Bytes up to the next tensor."""
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT
