"""Attention whose scores grow by a learned number for each head and bucket of distances, as a layer's mixer (T5).

Legend: T tokens, N heads, C columns of q, k and v together, E distances.
"""

import math
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import torch

from quire.attention.interface import AttentionRequest
from quire.config.kv_spec import KVCacheSpec
from quire.kernels import compressed, relative
from quire.layers.assembly import Weight
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.attention import AttentionLayer
from quire.layers.mixers.interface import MixerLayer
from quire.layers.mixers.relative import check_pages
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.parallel import ParallelPlan
from quire.models.spec import Attention
from quire.models.variants import BucketAttention


class BucketAttentionLayer(AttentionLayer):
    """The numbers become a table by distance when they are loaded; a layer without its own reads another's."""

    can_replay = False
    can_stage = False

    def __init__(self, mixer: BucketAttention, context: LayerContext) -> None:
        check_pages(context)
        super().__init__(mixer, context)
        self.can_narrow = False
        self._buckets, self._owner = mixer, self

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        yield from AttentionLayer.modules(builder, mixer)
        buckets = cast(BucketAttention, mixer)
        if buckets.table_layer is None:
            yield builder.table("buckets", (RowBlock(buckets.buckets, 1),), mixer.heads)

    @classmethod
    def attention_requests(
        cls, mixer: Attention, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        return []

    def see_layers(self, layers: Sequence[Sequence[MixerLayer]]) -> None:
        if self._buckets.table_layer is not None:
            (owner,) = layers[self._buckets.table_layer]
            self._owner = cast(BucketAttentionLayer, owner)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "buckets" and isinstance(weight, torch.Tensor):
            mine = weight[:, self.context.plan.groups(self.mixer.heads, "heads")]
            weight = mine[buckets_by_distance(self._buckets).to(mine.device)]
        super().set_weight(name, weight)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        (spec,) = super().kv_cache_specs()
        return [msgspec.structs.replace(spec, num_kv_heads=1, head_dim=spec.num_kv_heads * spec.head_dim)]

    def _attend(self, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        kv_cache, metadata, params = self._pages(step)
        size = self.mixer.head_dim
        compressed.keep_rows(qkv_TC[:, self.narrow :], kv_cache, metadata)
        relative.relative_attention(
            qkv_TC[:, : self.narrow].unflatten(1, (-1, size)),
            None,
            self._owner.tensors["buckets"],
            kv_cache,
            metadata,
            params,
            out_TNH.unflatten(1, (-1, size)),
        )


def buckets_by_distance(mixer: BucketAttention) -> torch.Tensor:
    """[E]: the bucket of each distance of a query from its key: 0 to `furthest`, or `-furthest` to it if not causal.

    The first half of the buckets (of a direction's) have a distance each, the others grow with the logarithm."""
    furthest = mixer.furthest
    distance_E = torch.arange(0 if mixer.causal else -furthest, furthest + 1)
    count = mixer.buckets if mixer.causal else mixer.buckets // 2
    exact, far_E = count // 2, distance_E.abs()
    growth_E = torch.log(far_E.clamp(min=1).float() / exact) / math.log(furthest / exact) * (count - exact)
    bucket_E = torch.where(far_E < exact, far_E, (exact + growth_E.long()).clamp(max=count - 1))
    return bucket_E if mixer.causal else bucket_E + (distance_E < 0) * count
