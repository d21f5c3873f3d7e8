"""Attention with queries of its own over another layer's keys and values (Gemma 3n and 4's last layers).

Legend: T tokens, N query heads, H head size, C columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.config.kv_spec import KVCacheSpec
from quire.kernels.types import LinearWeight
from quire.layers.interface import StepInputs
from quire.layers.mixers.attention import AttentionLayer
from quire.layers.mixers.interface import LayerContext, MixerLayer
from quire.layers.modules import LayerScope, Module, Part
from quire.models.spec import Attention
from quire.models.variants import SharedKV

if TYPE_CHECKING:
    from quire.layers.assembly import NormWeight, Weight


class SharedKVLayer(AttentionLayer):
    """Queries alone; pages, their group and the constants of attention are the owner's."""

    NAMES = frozenset(("q", "q_norm", "out"))

    def __init__(self, mixer: SharedKV, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self._columns = self.wide = self.narrow
        self._owner: AttentionLayer = self

    @staticmethod
    def modules(scope: LayerScope, mixer: Attention) -> Iterator[Module]:
        queries = Part(mixer.heads * mixer.head_dim, mixer.heads)
        yield scope.linear("q", (queries,), bias=mixer.qkv_bias, shard="rows")
        if mixer.qk_norm is not None:
            yield scope.norm("q_norm", mixer.qk_norm, mixer.head_dim)
        yield scope.linear(
            "out", (scope.hidden,), queries.rows, bias=mixer.out_bias, shard="columns", groups=mixer.heads
        )

    def see_layers(self, layers: Sequence[Sequence[MixerLayer]]) -> None:
        (owner,) = layers[cast(SharedKV, self.mixer).kv_layer]
        self._owner = cast(AttentionLayer, owner)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "q":
            self.linears["qkv"] = cast(LinearWeight, weight)
        elif name == "q_norm":
            self.norms["k_norm"] = cast("NormWeight", weight)  # which no key has
            super().set_weight(name, weight)
        else:
            super().set_weight(name, weight)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return []

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        """It has no pages of its own."""

    def _pages(self, step: StepInputs) -> tuple[torch.Tensor, AttentionMetadata, AttentionParams]:
        return self._owner._pages(step)

    def _rotate_and_cache(self, step: StepInputs, qkv_TC: torch.Tensor) -> None:
        kv_cache, metadata, params = self._pages(step)
        only_queries, norms = dataclasses.replace(params, num_kv_heads=0), self._prepare_heads(qkv_TC)
        self.context.backend.rope_and_cache(qkv_TC, kv_cache, metadata, only_queries, self.rope, *norms)

    def _attend(self, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        self._rotate_and_cache(step, qkv_TC)
        self.context.backend.forward(qkv_TC, *self._pages(step), out_TNH)
