"""Attention over pages as a layer's mixer: one matrix in, the backend's work, one matrix out.

Legend: T tokens, D hidden, N query heads, H head size, C columns of q, k and v together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from quire.attention.interface import AttentionParams, AttentionRequest
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.kernels import ops
from quire.layers.parallel import ParallelPlan
from quire.models.interface import StepInputs
from quire.models.mixers.interface import LayerContext, MixerLayer
from quire.models.modules import LayerScope, Module, Part
from quire.models.rope import Rope
from quire.models.spec import Attention
from quire.models.workspace import TokenViews

if TYPE_CHECKING:
    from quire.models.assembly import Weight


class AttentionLayer(MixerLayer):
    """Grouped-query attention."""

    NAMES = frozenset(("qkv", "out", "q_norm", "k_norm", "sinks"))
    can_fuse = True

    def __init__(self, mixer: Attention, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.mixer = mixer
        heads, kv_heads = _local_heads(mixer, context.plan)
        self.params = AttentionParams(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
            window=mixer.window,
            soft_cap=mixer.soft_cap,
            deterministic=context.deterministic,
        )
        self.rope = None if mixer.rope is None else rotary_table(mixer.rope, context)
        self.wide = (heads + 2 * kv_heads) * mixer.head_dim
        self.narrow = heads * mixer.head_dim
        self._kv_cache: torch.Tensor = torch.empty(0)
        self._group = 0

    @staticmethod
    def modules(scope: LayerScope, mixer: Attention) -> Iterator[Module]:
        q, kv = Part(mixer.heads * mixer.head_dim, mixer.heads), Part(mixer.kv_heads * mixer.head_dim, mixer.kv_heads)
        yield scope.linear("qkv", (q, kv, kv), bias=mixer.qkv_bias, shard="rows")
        if mixer.qk_norm is not None:
            yield scope.norm("q_norm", mixer.qk_norm, mixer.head_dim)
            yield scope.norm("k_norm", mixer.qk_norm, mixer.head_dim)
        if mixer.sinks:
            yield scope.vector("sinks", Part(mixer.heads, mixer.heads), "rows")
        yield scope.linear("out", (scope.hidden,), q.rows, bias=mixer.out_bias, shard="columns", groups=mixer.heads)

    @staticmethod
    def attention_requests(
        mixer: Attention, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        heads, kv_heads = _local_heads(mixer, plan)
        return [
            AttentionRequest(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=mixer.head_dim,
                kv_dtype=kv_dtype,
                block_size=block_size,
                window=mixer.window,
                soft_cap=mixer.soft_cap,
                has_sinks=mixer.sinks,
                deterministic=deterministic,
            )
        ]

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "sinks":
            self.params = dataclasses.replace(self.params, sinks=weight)
        else:
            super().set_weight(name, weight)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        context, params = self.context, self.params
        return [
            KVCacheSpec(
                kind=KVKind.SLIDING_WINDOW if self.mixer.window > 0 else KVKind.FULL,
                block_size=context.block_size,
                bytes_per_token=2 * params.num_kv_heads * params.head_dim * context.kv_dtype.itemsize,
                num_kv_heads=params.num_kv_heads,
                head_dim=params.head_dim,
                dtype=str(context.kv_dtype).removeprefix("torch."),
                window=self.mixer.window,
            )
        ]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        (self._kv_cache,), (self._group,) = kv_caches, groups

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        qkv_TC, attended_TNH = views.wide(self.wide), views.narrow(self.narrow)
        self.context.linear_method.apply(x_TD, self.linears["qkv"], qkv_TC)
        self._attend(step, qkv_TC, attended_TNH)
        self.context.linear_method.apply(attended_TNH, self.linears["out"], out_TD)

    def run_normed(self, norm_D: torch.Tensor, eps: float, step: StepInputs, views: TokenViews) -> None:
        qkv_TC, attended_TNH = views.wide(self.wide), views.narrow(self.narrow)
        self.context.linear_method.apply_normed(
            views.residual_TD, norm_D, eps, self.linears["qkv"], qkv_TC, views.normed_TD
        )
        self._attend(step, qkv_TC, attended_TNH)
        self.add_to_residual(attended_TNH, self.linears["out"], views)

    def _attend(self, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        """Norms of heads, rotation, pages and attention: the backend's business."""
        backend, metadata, norm = self.context.backend, step.attention[self._group], self.mixer.qk_norm
        if norm is None:
            backend.attend(qkv_TC, self._kv_cache, metadata, self.params, out_TNH, self.rope)
        else:
            q_norm, k_norm = self.norms["q_norm"].weight, self.norms["k_norm"].weight
            backend.attend(qkv_TC, self._kv_cache, metadata, self.params, out_TNH, self.rope, q_norm, k_norm, norm.eps)


def rotary_table(rope: Rope, context: LayerContext) -> ops.Rope:
    """The table of a rotation, made once for all layers that have it."""
    if rope not in context.tables:
        cos_sin = rope.table(context.max_positions).to(context.device)
        context.tables[rope] = ops.Rope(cos_sin, rope.rotary_dim, rope.interleaved)
    return context.tables[rope]


def _local_heads(mixer: Attention, plan: ParallelPlan) -> tuple[int, int]:
    heads, kv_heads = plan.groups(mixer.heads, "heads"), plan.groups(mixer.kv_heads, "KV heads")
    return heads.stop - heads.start, kv_heads.stop - kv_heads.start
