"""Attention to what an encoder has read beside the prompt, as a layer's mixer.

Keys and values are written when the encoder has run, and read in every step. They never grow.
Legend: T tokens, E rows of the encoder, D its width, N heads, K KV heads, H head size, C columns.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, cast

import msgspec
import torch

from quire.attention.interface import AttentionMetadata
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.kernels.types import LinearWeight
from quire.layers.assembly import Weight
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.attention import AttentionLayer
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.models.spec import Attention
from quire.models.variants import CrossAttention


class CrossAttentionLayer(AttentionLayer):
    """Queries over an encoder's keys and values."""

    can_stage: ClassVar[bool] = False

    def __init__(self, mixer: CrossAttention, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self._columns = self.wide = self.narrow
        self.can_narrow = True
        self._length = mixer.length

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        queries = RowBlock(mixer.heads * mixer.head_dim, mixer.heads)
        keys = RowBlock(mixer.kv_heads * mixer.head_dim, mixer.kv_heads)
        yield builder.linear("q", (queries,), bias=mixer.qkv_bias, shard="rows")
        yield builder.linear("kv", (keys, keys), bias=mixer.qkv_bias, shard="rows")
        yield builder.linear(
            "out", (builder.hidden,), queries.rows, bias=mixer.out_bias, shard="columns", groups=mixer.heads
        )

    def set_weight(self, name: str, weight: Weight) -> None:
        super().set_weight("qkv" if name == "q" else name, weight)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        (spec,) = super().kv_cache_specs()
        return [msgspec.structs.replace(spec, kind=KVKind.CROSS, window=self._length)]

    def keep(self, rows_ED: torch.Tensor, slots_E: torch.Tensor) -> None:
        """Write keys and values of what the encoder has read to these slots."""
        weight = cast(LinearWeight, self.linears["kv"])
        kv_EC = rows_ED.new_empty(len(rows_ED), weight.out_features)
        self.context.linear_method.apply(rows_ED, weight, kv_EC)
        only_keys, nothing = dataclasses.replace(self.params, num_heads=0), slots_E[:0].int()
        metadata = AttentionMetadata(
            self.context.block_size, nothing, nothing, nothing, nothing, slots_E, nothing, nothing, len(slots_E)
        )
        self.context.backend.rope_and_cache(kv_EC, self._kv_cache, metadata, only_keys, None)

    def _attend(self, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        self.context.backend.forward(qkv_TC, *self._pages(step), out_TNH)

    def _rotate_and_cache(self, step: StepInputs, qkv_TC: torch.Tensor) -> None:
        """Its keys and values are there."""
