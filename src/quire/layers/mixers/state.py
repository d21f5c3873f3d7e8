"""What mixers have in common that keep a state instead of keys and values: its place in the pages, and room to compute in.

Knows where a state lies. Knows no arithmetic.
Legend: T tokens, P pages.
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from quire.attention.interface import AttentionMetadata
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.layers.assembly import Weight
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.interface import MixerLayer
from quire.layers.workspace import TokenViews


class PagedState(MixerLayer):
    """A mixer with one state a request.

    Args:
        shapes: of the parts of a state, which lie one after the other in a page as float32.
    """

    def __init__(self, mixer: Any, context: LayerContext, *shapes: tuple[int, ...]) -> None:
        super().__init__(mixer, context)
        self._shapes = shapes
        self._group = 0
        self.states: list[torch.Tensor] = []
        """Each part in all pages: [P, *shape]."""

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        # At least one number: a convolution over one token keeps nothing, but has its page.
        num_bytes = 4 * max(sum(torch.Size(shape).numel() for shape in self._shapes), 1)
        return [
            KVCacheSpec(
                kind=KVKind.RECURRENT, block_size=self.context.block_size, bytes_per_token=num_bytes, dtype="float32"
            )
        ]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        (pages,), (self._group,) = kv_caches, groups
        self.states, start = [], 0
        for shape in self._shapes:
            end = start + 4 * torch.Size(shape).numel()
            self.states.append(pages[:, start:end].view(torch.float32).unflatten(1, shape))
            start = end

    def set_weight(self, name: str, weight: Weight) -> None:
        if isinstance(weight, torch.Tensor):
            weight = -weight.exp() if name.endswith("a_log") else weight
            weight = weight.t().contiguous() if weight.dim() == 2 else weight  # kernels want channels side by side
        super().set_weight(name, weight)

    def metadata(self, step: StepInputs) -> AttentionMetadata:
        """The step's batch, as this layer's pages see it."""
        return step.attention[self._group]


class StateLayer(PagedState):
    """One that reads its input by matrices alone, and whose last matrix is the module `OUT`."""

    OUT: ClassVar[str]
    can_fuse = True

    @abc.abstractmethod
    def mix(self, x: HalfInput, step: StepInputs, views: TokenViews) -> torch.Tensor:
        """What the last matrix reads."""

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        out.multiply(self.mix(x, step, views), self.linears[self.OUT], views)
