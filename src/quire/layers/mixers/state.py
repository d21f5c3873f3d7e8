"""What mixers have in common that keep a state instead of keys and values: its place in the pages, and room to compute in.

Knows where a state lies. Knows no arithmetic.
Legend: T tokens, P pages.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from quire.attention.interface import AttentionMetadata
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.layers.interface import StepInputs
from quire.layers.mixers.interface import LayerContext, MixerLayer
from quire.layers.workspace import TokenViews

if TYPE_CHECKING:
    from quire.layers.assembly import Weight

Read = Callable[[str, torch.Tensor], None]
"""Multiply the mixer's input by one of its matrices, by name, into a tensor."""


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

    def constant(self, name: str) -> torch.Tensor | None:
        """A bare tensor of the checkpoint, if this layer has it."""
        return self.tensors.get(name)

    @staticmethod
    def room(views: TokenViews, *columns: int) -> list[torch.Tensor]:
        """Contiguous [T, columns] side by side in the wide buffer."""
        buffer_TC = views.wide(sum(columns))
        flat, tokens, start, parts = buffer_TC.view(-1), buffer_TC.shape[0], 0, list[torch.Tensor]()
        for count in columns:
            parts.append(flat[start : start + tokens * count].view(tokens, count))
            start += tokens * count
        return parts


class StateLayer(PagedState):
    """One that reads its input by matrices alone, and whose last matrix is the module `OUT`."""

    OUT: ClassVar[str]
    can_fuse = True

    @abc.abstractmethod
    def mix(self, read: Read, step: StepInputs, views: TokenViews) -> torch.Tensor:
        """What the last matrix reads."""

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        method = self.context.linear_method
        y_TC = self.mix(lambda name, out: method.apply(x_TD, self.linears[name], out), step, views)
        method.apply(y_TC, self.linears[self.OUT], out_TD)

    def run_normed(self, norm_D: torch.Tensor, eps: float, step: StepInputs, views: TokenViews) -> None:
        method = self.context.linear_method

        def read(name: str, out_TC: torch.Tensor) -> None:
            method.apply_normed(views.residual_TD, norm_D, eps, self.linears[name], out_TC, views.normed_TD)

        self.add_to_residual(self.mix(read, step, views), self.linears[self.OUT], views)
