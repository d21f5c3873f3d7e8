"""Attention whose queries and outputs come from experts (JetMoE): a token's k-th expert makes the k-th query of every KV head.

Experts run one after the other, in the model's own number type; keys, values and attention are those of other models.
Legend: T tokens, D hidden, E experts, K experts a token, N KV heads, H head size, C = N * H.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch

from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers.interface import StepInputs
from quire.layers.mixers.attention import AttentionLayer
from quire.layers.mixers.interface import LayerContext
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.workspace import TokenViews
from quire.models.spec import Attention
from quire.models.variants import ExpertAttention

if TYPE_CHECKING:
    from quire.layers.assembly import Weight


class ExpertAttentionLayer(AttentionLayer):
    """KV heads are shared out over ranks, and each expert's matrices with them."""

    NAMES = frozenset(("kv", "q_router", "q_experts", "out_experts", "out_bias"))

    def __init__(self, mixer: ExpertAttention, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.can_fuse = self.can_narrow = self.can_replay = False
        self._routing, self._experts = mixer.routing, dict[str, list[LinearWeight]]()

    @staticmethod
    def modules(scope: LayerScope, mixer: Attention) -> Iterator[Module]:
        experts, kv = cast(ExpertAttention, mixer).routing.num_experts, mixer.kv_heads * mixer.head_dim
        heads = Part(kv, mixer.kv_heads)
        yield scope.linear("kv", (heads, heads), shard="rows")
        yield scope.linear("q_router", (Part(experts, 1),), plain=True)
        q_experts = scope.experts("q_experts", experts, (heads,), shard="rows")
        out = scope.experts("out_experts", experts, (scope.hidden,), kv, shard="columns", groups=mixer.kv_heads)
        yield from (dataclasses.replace(each, plain=True) for each in (q_experts, out))
        yield scope.vector("out_bias", scope.hidden)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name in ("q_experts", "out_experts"):
            if self.context.plan.expert_parallel:
                raise ConfigError(
                    "experts of attention are split by heads, not shared out", setting="enable_expert_parallel"
                )
            listed = [ops.pack_linear(each) for each in cast(torch.Tensor, weight)]
            self._experts[name] = listed
        elif name == "out_bias" and self.context.plan.rank > 0:  # outputs are summed over ranks: one adds it
            super().set_weight(name, torch.zeros_like(cast(torch.Tensor, weight)))
        else:
            super().set_weight(name, weight)

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        tokens, heads, size, top_k = len(x_TD), self.params.num_kv_heads, self.mixer.head_dim, self._routing.top_k
        qkv_TC, attended_TC = views.wide(self.wide), views.narrow(self.narrow)
        kv_TC = x_TD.new_empty(tokens, 2 * heads * size)
        self.context.linear_method.apply(x_TD, self.linears["kv"], kv_TC)
        qkv_TC[:, self.narrow :] = kv_TC
        ids_TK, weights_TK = self._choose(x_TD, step)
        queries_TKC = x_TD.new_zeros(tokens, top_k, heads * size)
        for expert, token, k in _by_expert(ids_TK):
            queries_TKC[token, k] = self._multiply("q_experts", expert, x_TD[token])
        queries_TKNH = queries_TKC.view(tokens, top_k, heads, size)
        qkv_TC[:, : self.narrow] = queries_TKNH.transpose(1, 2).flatten(1)
        self._attend(step, qkv_TC, attended_TC)
        given_TKC = attended_TC.view(tokens, heads, top_k, size).transpose(1, 2).flatten(2)
        out_TD.copy_(self.tensors["out_bias"].expand(tokens, -1))
        for expert, token, k in _by_expert(ids_TK):
            given_SD = self._multiply("out_experts", expert, given_TKC[token, k])
            out_TD.index_add_(0, token, given_SD * weights_TK[token, k, None].to(given_SD.dtype))

    def _choose(self, x_TD: torch.Tensor, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(x_TD), self._routing.top_k)
        logits_TE = torch.empty(len(x_TD), self._routing.num_experts, device=x_TD.device)
        ids_TK = torch.zeros(shape, dtype=torch.int32, device=x_TD.device)
        weights_TK = torch.zeros(shape, device=x_TD.device)
        ops.linear(x_TD, self.linears["q_router"], logits_TE)
        ops.moe_route(logits_TE, self._routing, step.attention[0].shape, ids_TK, weights_TK)
        return ids_TK, weights_TK

    def _multiply(self, name: str, expert: int, x_SK: torch.Tensor) -> torch.Tensor:
        weight = self._experts[name][expert]
        out_SM = x_SK.new_empty(len(x_SK), weight.out_features)
        ops.linear(x_SK.contiguous(), weight, out_SM)
        return out_SM


def _by_expert(ids_TK: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert that some token chose, the tokens, and which of their choices it is."""
    pairs, top_k = ids_TK.flatten().sort(stable=True), ids_TK.shape[1]
    hit, counts = pairs.values.unique_consecutive(return_counts=True)
    for expert, chosen in zip(hit.tolist(), pairs.indices.split(counts.tolist()), strict=True):
        yield expert, chosen // top_k, chosen % top_k
