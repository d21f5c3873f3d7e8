"""What a layer's mixer is to the model: the part that looks at other tokens, and keeps something of them in pages; and those that
keep a state instead of keys and values.

Knows what every kind must answer. Knows no kind.
Legend: T tokens, D hidden, P pages.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from quire.attention.interface import AttentionMetadata, AttentionRequest
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.distributed.communicator import Communicator
from quire.kernels.types import HeadWeight
from quire.layers.assembly import Weight
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.held_weights import HeldWeights
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.modules import Module, ModuleBuilder
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews

SCALES = ("k_scale", "v_scale")
"""Of keys and of values in pages of float8, where the checkpoint has them."""


class MixerLayer(HeldWeights, abc.ABC):
    """One mixer of one layer on this rank.

    Attributes:
        wide, narrow: columns a token that it needs of the workspace's wide and narrow buffers; the rest is its own.
        can_fuse: whether its input may be a `NormedInput` and its output a `ResidualOutput`.
        can_replay: whether a step with it can be recorded, or captured as a graph, and run again for other requests.
        can_narrow: whether it can give an output for the tokens that need logits alone.
        changes_mlp: whether it changes what the layer's feed-forward gives.
    """

    can_shard: ClassVar[bool] = True
    """Whether ranks can share such a mixer."""

    can_stage: ClassVar[bool] = True
    """Whether it reads nothing of other layers but what stages of a pipeline hand over."""

    wide: int = 0
    narrow: int = 0
    can_fuse: bool = False
    can_narrow: bool = False
    can_replay: bool = True
    changes_mlp: bool = False

    def __init__(self, mixer: Any, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.head_weights: dict[str, HeadWeight] = {}

    @staticmethod
    @abc.abstractmethod
    def modules(builder: ModuleBuilder, mixer: Any) -> Iterator[Module]:
        """Its matrices, norms and vectors, in the order of computation."""

    @staticmethod
    def attention_requests(
        mixer: Any, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        """What it needs of an attention backend; nothing where it has no use for one."""
        return []

    def see_layers(self, layers: Sequence[Sequence[MixerLayer]]) -> None:
        """Called once with all layers' mixers, before weights: for those that read another layer's pages."""

    def multiply(self, name: str, x_TK: torch.Tensor) -> torch.Tensor:
        """A matrix's product in a tensor of its own: for steps that are not recorded."""
        out_TN = x_TK.new_empty(len(x_TK), self.linears[name].out_features)
        self.context.linear_method.apply(x_TK, self.linears[name], out_TN)
        return out_TN

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """What it keeps of past tokens: mostly one entry."""

    @abc.abstractmethod
    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        """For each entry of `kv_cache_specs`, its pages and which of `StepInputs.attention` describes them."""

    def set_cache_scale(self, name: str, scale: torch.Tensor) -> None:
        """Take one of `SCALES`, if it has keys and values in pages."""

    @abc.abstractmethod
    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        """out = this rank's part of the mixer of x; the parts of all ranks are summed by the caller. `views` lends its wide
        and narrow buffers; `out` is neither x nor one of these. With `out.sampled` only the tokens of `step.sampled` have an
        output; all are kept in pages."""

    def change_mlp(self, step: StepInputs, delta_TD: torch.Tensor) -> None:
        """Change the feed-forward's output, summed over ranks, in place; called only where it `changes_mlp`."""


def rms_norm_over_ranks(
    communicator: Communicator, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], eps: float
) -> None:
    """One RMS norm of each tensor [T, C], in place, over the columns of all ranks. Heads that ranks share count once for each."""
    means_XT = torch.stack([x.float().square().mean(-1) / communicator.size for x in tensors])
    communicator.all_reduce(means_XT)
    for x, mean_T, weight in zip(tensors, means_XT, weights, strict=True):
        x.copy_(x.float() * torch.rsqrt(mean_T + eps)[:, None] * weight)


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
