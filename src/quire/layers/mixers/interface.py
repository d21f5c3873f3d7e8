"""What a layer's mixer is to the model: the part that looks at other tokens, and keeps something of them in pages.

Knows what every kind must answer. Knows no kind.
Legend: T tokens, D hidden.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from quire.attention.interface import AttentionBackend, AttentionRequest
from quire.config.kv_spec import KVCacheSpec
from quire.distributed.communicator import Communicator
from quire.kernels.types import LinearWeight
from quire.layers.interface import StepInputs
from quire.layers.linear import LinearMethod
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews

if TYPE_CHECKING:
    from quire.layers.assembly import NormWeight, Weight
    from quire.layers.modules import LayerScope, Module


@dataclasses.dataclass
class LayerContext:
    """What the layers of one model have in common.

    Attributes:
        dtype: type of the weights. `activation_dtype`: of the buffers between layers. `kv_dtype`: of keys and values in pages.
        block_size: tokens a page.
        max_positions: length of rotary tables.
        tables: what layers share and one of them made, by what it was made from (rotary tables by `Rope`).
    """

    hidden: int
    dtype: torch.dtype
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    max_tokens: int
    max_positions: int
    device: torch.device
    plan: ParallelPlan
    communicator: Communicator
    linear_method: LinearMethod
    backend: AttentionBackend
    deterministic: bool
    tables: dict[Any, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class NarrowViews:
    """Buffers of a layer that ends with fewer tokens than it begins with.

    Attributes:
        all, sampled: of all tokens, and of those that need logits. rows: room for these ones' rows of the wide buffer.
    """

    all: TokenViews
    sampled: TokenViews
    rows: torch.Tensor


class MixerLayer(abc.ABC):
    """One mixer of one layer on this rank.

    Attributes:
        wide, narrow: columns a token that it needs of the workspace's wide and narrow buffers; the rest is its own.
        can_fuse: whether `run_normed` may be used.
        can_replay: whether a step with it can be recorded, or captured as a graph, and run again for other requests.
        can_narrow: whether `run_narrow` and `run_normed_narrow` may be used.
    """

    NAMES: ClassVar[frozenset[str]]
    """Every module that a mixer of this kind may have, without `layers.N.`."""

    can_shard: ClassVar[bool] = True
    """Whether ranks can share such a mixer."""

    wide: int = 0
    narrow: int = 0
    can_fuse: bool = False
    can_narrow: bool = False
    can_replay: bool = True

    def __init__(self, mixer: Any, context: LayerContext) -> None:
        self.context = context
        self.linears: dict[str, LinearWeight] = {}
        self.norms: dict[str, NormWeight] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    @staticmethod
    @abc.abstractmethod
    def modules(scope: LayerScope, mixer: Any) -> Iterator[Module]:
        """Its matrices, norms and vectors, in the order of computation."""

    @staticmethod
    def attention_requests(
        mixer: Any, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        """What it needs of an attention backend; nothing where it has no use for one."""
        return []

    def see_layers(self, layers: Sequence[Sequence[MixerLayer]]) -> None:
        """Called once with all layers' mixers, before weights: for those that read another layer's pages."""

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        if isinstance(weight, LinearWeight):
            self.linears[name] = weight
        elif isinstance(weight, torch.Tensor):
            self.tensors[name] = weight
        else:
            self.norms[name] = cast("NormWeight", weight)

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """What it keeps of past tokens: mostly one entry."""

    @abc.abstractmethod
    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        """For each entry of `kv_cache_specs`, its pages and which of `StepInputs.attention` describes them."""

    @abc.abstractmethod
    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        """out = this rank's part of the mixer of x; the parts of all ranks are summed by the caller. `views` lends its wide
        and narrow buffers; `out` is neither x nor one of these."""

    def run_normed(self, norm_D: torch.Tensor, eps: float, step: StepInputs, views: TokenViews) -> None:
        """residual += the mixer of rms_norm(residual), in fewer passes. Over several ranks rank 0 adds its part to the
        residual and the others put theirs in its place: the caller sums."""
        raise NotImplementedError(f"{type(self).__name__} has no fused form")

    def run_narrow(self, x_TD: torch.Tensor, out_SD: torch.Tensor, step: StepInputs, narrow: NarrowViews) -> None:
        """As `run`, but only the tokens of `step.sampled` have an output; all are kept in pages."""
        raise NotImplementedError(f"{type(self).__name__} has no narrow form")

    def run_normed_narrow(self, norm_D: torch.Tensor, eps: float, step: StepInputs, narrow: NarrowViews) -> None:
        """As `run_normed`, on the residual of `step.sampled`'s tokens alone, which it gathers first."""
        raise NotImplementedError(f"{type(self).__name__} has no narrow form")

    def add_to_residual(self, x_TK: torch.Tensor, weight: LinearWeight, views: TokenViews) -> None:
        """residual += x @ weight.T, as `run_normed` says it of several ranks."""
        if self.context.plan.rank == 0:
            self.context.linear_method.apply_add(x_TK, weight, views.residual_TD, views.delta_TD)
        else:
            self.context.linear_method.apply(x_TK, weight, views.residual_TD)
