"""Attention whose values are narrower than its keys (MiMo-V2-Flash). Pages hold values with zeros behind them.

Legend: T tokens, D hidden, N query heads, K KV heads, H size of keys, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from quire.kernels import ops
from quire.layers.interface import StepInputs
from quire.layers.mixers.attention import AttentionLayer
from quire.layers.mixers.interface import LayerContext
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.workspace import TokenViews
from quire.models.spec import Attention
from quire.models.variants import NarrowValues


class NarrowValuesLayer(AttentionLayer):
    """As other attention, between a matrix with narrower values and one that reads as narrow ones."""

    NAMES = frozenset(("qkv", "out", "sinks"))

    def __init__(self, mixer: NarrowValues, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.can_fuse = self.can_narrow = False
        self._value_dim = mixer.value_dim

    @staticmethod
    def modules(scope: LayerScope, mixer: Attention) -> Iterator[Module]:
        value_dim = cast(NarrowValues, mixer).value_dim
        sizes = ((mixer.heads, mixer.head_dim), (mixer.kv_heads, mixer.head_dim), (mixer.kv_heads, value_dim))
        parts = tuple(Part(heads * size, heads) for heads, size in sizes)
        yield scope.linear("qkv", parts, bias=mixer.qkv_bias, shard="rows")
        if mixer.sinks:
            yield scope.vector("sinks", Part(mixer.heads, mixer.heads), "rows")
        columns = mixer.heads * value_dim
        yield scope.linear("out", (scope.hidden,), columns, bias=mixer.out_bias, shard="columns", groups=mixer.heads)

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        tokens, size, value_dim, method = len(x_TD), self.mixer.head_dim, self._value_dim, self.context.linear_method
        heads, kv_heads = self.params.num_heads, self.params.num_kv_heads
        keyed = (heads + kv_heads) * size
        projected_TC = x_TD.new_empty(tokens, keyed + kv_heads * value_dim)
        method.apply(x_TD, self.linears["qkv"], projected_TC)
        qkv_TC, attended_TC = views.wide(self.wide), views.narrow(self.narrow)
        qkv_TC[:, :keyed] = projected_TC[:, :keyed]
        values_TKH = qkv_TC[:, keyed:].unflatten(1, (kv_heads, size))
        values_TKH[..., :value_dim] = projected_TC[:, keyed:].unflatten(1, (kv_heads, value_dim))
        values_TKH[..., value_dim:] = 0.0
        self._attend(step, qkv_TC, attended_TC)
        given_TC = attended_TC.view(tokens, heads, size)[..., :value_dim].reshape(tokens, -1)
        method.apply(given_TC, self.linears["out"], out_TD)
        if self.mixer.out_scale != 1.0:
            ops.scale_and_cap(out_TD, self.mixer.out_scale, 0.0)
