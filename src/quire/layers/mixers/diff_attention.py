"""Differential attention (DiffLlama): two maps of scores over the same values, the second taken away from the first.

Pages hold heads of twice the size: keys with zeros behind them, and two KV heads' values side by side, for both halves of keys.
Legend: T tokens, D hidden, N query heads, K KV heads, H head size, W = 2 * H.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch

from quire.attention.interface import AttentionRequest
from quire.kernels.norm import head_norm
from quire.layers.interface import StepInputs
from quire.layers.mixers.attention import AttentionLayer, rotary_table
from quire.layers.mixers.interface import LayerContext
from quire.layers.modules import Deal, LayerScope, Module, Part
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews
from quire.models.spec import Attention
from quire.models.variants import DiffAttention

if TYPE_CHECKING:
    from quire.layers.assembly import Weight

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class DiffAttentionLayer(AttentionLayer):
    """Ranks have the same heads of both halves."""

    NAMES = frozenset(("qkv", "out", *LAMBDAS))

    def __init__(self, mixer: DiffAttention, context: LayerContext) -> None:
        super().__init__(_widened(mixer), context)
        self.rope = None if mixer.rope is None else rotary_table(mixer.rope, context)
        self.can_fuse = self.can_narrow = False
        self._diff = mixer
        groups = self.params.num_heads // 2
        self._gain_NW = torch.full((groups, 2 * mixer.head_dim), 1.0 - mixer.start, device=context.device)
        self._share = 0.0

    @staticmethod
    def modules(scope: LayerScope, mixer: Attention) -> Iterator[Module]:
        q, kv = (Part(heads // 2 * mixer.head_dim, heads // 2) for heads in (mixer.heads, mixer.kv_heads))
        parts, deals = (q, q, kv, kv, kv, kv), (Deal((0, 1)), Deal((2, 3)), Deal((4, 5)))
        yield scope.linear("qkv", parts, bias=mixer.qkv_bias, shard="rows", deals=deals)
        for name in LAMBDAS:
            yield scope.vector(name, Part(mixer.head_dim, 1))
        pairs = mixer.heads // 2
        yield scope.linear("out", (scope.hidden,), 2 * q.rows, bias=mixer.out_bias, shard="columns", groups=pairs)

    @staticmethod
    def attention_requests(
        mixer: Attention, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        wide = _widened(cast(DiffAttention, mixer))
        return AttentionLayer.attention_requests(wide, kv_dtype, block_size, plan, deterministic)

    def set_weight(self, name: str, weight: Weight) -> None:
        super().set_weight(name, weight)
        if name in LAMBDAS and all(each in self.tensors for each in LAMBDAS):
            q1_H, k1_H, q2_H, k2_H = (self.tensors[each].float() for each in LAMBDAS)
            self._share = float((q1_H @ k1_H).exp() - (q2_H @ k2_H).exp()) + self._diff.start

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        tokens, size, method = len(x_TD), self._diff.head_dim, self.context.linear_method
        heads, kv_heads = self.params.num_heads, self.params.num_kv_heads
        projected_TC = x_TD.new_empty(tokens, (heads + 2 * kv_heads) * size)
        method.apply(x_TD, self.linears["qkv"], projected_TC)
        keyed_TNH = projected_TC.view(tokens, -1, size)
        qkv_TC, attended_TC = views.wide(self.wide), views.narrow(self.narrow)
        qkv_TNW = qkv_TC.view(tokens, -1, 2 * size)
        qkv_TNW.zero_()
        qkv_TNW[:, : heads + kv_heads, :size] = keyed_TNH[:, : heads + kv_heads]
        first_TKH, second_TKH = keyed_TNH[:, heads + kv_heads :].chunk(2, dim=1)
        qkv_TNW[:, heads + kv_heads :] = torch.cat((first_TKH, second_TKH), dim=-1).repeat(1, 2, 1)
        self._attend(step, qkv_TC, attended_TC)
        plus_TC, minus_TC = attended_TC.chunk(2, dim=1)
        difference_TC = plus_TC - self._share * minus_TC
        head_norm(difference_TC, self._gain_NW, None, self._diff.norm.eps, subtract_mean=False)
        method.apply(difference_TC, self.linears["out"], out_TD)


def _widened(mixer: DiffAttention) -> DiffAttention:
    """What pages and backends are told of it."""
    return dataclasses.replace(mixer, head_dim=2 * mixer.head_dim, scale=mixer.head_dim**-0.5)
