"""Multi-head latent attention as a layer's mixer, in its absorbed form: queries are brought to the latent, attention goes over
the latents themselves, and what it gives is brought to the heads' values.

Legend: T tokens, D hidden, N heads, Q values of a query head, V of a value head, R of the latent, E rotated ones, C = R + E,
U values of a head that do not rotate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.kernels import latent, ops, recurrent
from quire.kernels.norm import scale_rows
from quire.kernels.types import HeadWeight, LinearWeight
from quire.layers.assembly import NormWeight
from quire.layers.interface import StepInputs
from quire.layers.mixers.attention import SCALES, growth_table, rotary_table, with_cache_scale
from quire.layers.mixers.interface import LayerContext, MixerLayer
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews
from quire.models.spec import MLA

if TYPE_CHECKING:
    from quire.layers.assembly import Weight


class MLALayer(MixerLayer):
    """Heads are shared out over ranks; every rank keeps the latents of all tokens."""

    NAMES = frozenset(
        ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "head_gate", "gate", "sinks", "out", *SCALES)
    )
    can_fuse = True

    def __init__(self, mixer: MLA, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.mixer = mixer
        self.heads = _local_heads(mixer, context.plan)
        self.rope = rotary_table(mixer.rope, context)
        self.columns = mixer.kv_rank + mixer.rope.rotary_dim
        self.params = AttentionParams(
            num_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.columns,
            scale=_query_dim(mixer) ** -0.5 if mixer.scale is None else mixer.scale,
            latent=mixer.kv_rank,
            deterministic=context.deterministic,
        )
        # Of the wide buffer: queries (later the heads' values), the queries' latent, the latent, absorbed queries (later
        # gates).
        queries = self.heads * max(_query_dim(mixer), mixer.value_dim)
        gates = mixer.value_dim if mixer.output_gate else 0
        self._parts = (queries, mixer.q_rank, self.columns, self.heads * max(self.columns, gates))
        self.wide = sum(self._parts) + (self.heads if mixer.head_gate else 0)
        self.narrow = max(self.heads * max(mixer.kv_rank, mixer.value_dim), mixer.q_rank)
        self._growth_L = None if mixer.temperature is None else growth_table(mixer.temperature, context)
        self._to_latent: HeadWeight | None = None
        self._to_values: HeadWeight | None = None
        self._kv_cache = torch.empty(0)
        self._group = 0

    @staticmethod
    def modules(scope: LayerScope, mixer: MLA) -> Iterator[Module]:
        queries = (Part(mixer.heads * _query_dim(mixer), mixer.heads),)
        if mixer.q_rank:
            yield scope.linear("q_a", (Part(mixer.q_rank, 1),), bias=mixer.in_bias)
            yield scope.norm("q_a_norm", mixer.norm, mixer.q_rank)
            yield scope.linear("q_b", queries, mixer.q_rank, shard="rows")
        else:
            yield scope.linear("q", queries, shard="rows")
        yield scope.linear("kv_a", (Part(mixer.kv_rank + mixer.rope.rotary_dim, 1),), bias=mixer.in_bias)
        yield scope.norm("kv_a_norm", mixer.norm, mixer.kv_rank)
        keys_and_values = Part(mixer.heads * (mixer.nope_dim + mixer.value_dim), mixer.heads)
        yield scope.linear("kv_b", (keys_and_values,), mixer.kv_rank, shard="rows")
        if mixer.head_gate:
            yield scope.linear("head_gate", (Part(mixer.heads, mixer.heads),), shard="rows")
        values = mixer.heads * mixer.value_dim
        if mixer.output_gate:
            yield scope.linear("gate", (Part(values, mixer.heads),), shard="rows")
        if mixer.sinks:
            yield scope.vector("sinks", Part(mixer.heads, mixer.heads), "rows")
        yield scope.linear("out", (scope.hidden,), values, bias=mixer.out_bias, shard="columns", groups=mixer.heads)

    @staticmethod
    def attention_requests(
        mixer: MLA, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        return [
            AttentionRequest(
                num_heads=_local_heads(mixer, plan),
                num_kv_heads=1,
                head_dim=mixer.kv_rank + mixer.rope.rotary_dim,
                kv_dtype=kv_dtype,
                block_size=block_size,
                kind="mla",
                has_sinks=mixer.sinks,
                deterministic=deterministic,
                latent=mixer.kv_rank,
            )
        ]

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        context = self.context
        return [
            KVCacheSpec(
                kind=KVKind.MLA,
                block_size=context.block_size,
                bytes_per_token=self.columns * context.kv_dtype.itemsize,
                num_kv_heads=1,
                head_dim=self.columns,
                dtype=str(context.kv_dtype).removeprefix("torch."),
            )
        ]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        (self._kv_cache,), (self._group,) = kv_caches, groups

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "kv_b" and isinstance(weight, LinearWeight):
            self._absorb(weight)
        elif name in SCALES:  # latents are keys and values at once, and have the keys' scale
            self.params = with_cache_scale(self.params, name, cast(torch.Tensor, weight), self.context)
        elif name == "sinks":
            self.params = dataclasses.replace(self.params, sinks=weight)
        else:
            scale = {"q_a_norm": self.mixer.q_latent_scale, "kv_a_norm": self.mixer.kv_latent_scale}.get(name, 1.0)
            super().set_weight(name, weight)
            if scale != 1.0:
                self.norms[name] = NormWeight(self.norms[name].weight * scale)

    def _absorb(self, weight: LinearWeight) -> None:
        """From the matrix that makes keys and values of a latent to one from queries to the latent, and one from what
        attention gives to values."""
        mixer = self.mixer
        heads_NCR = plain_columns(weight, self.context).view(mixer.kv_rank, self.heads, -1).permute(1, 2, 0)
        keys_NUR, values_NVR = heads_NCR.split((mixer.nope_dim, mixer.value_dim), dim=1)
        self._to_latent, self._to_values = latent.pack_heads(keys_NUR.transpose(1, 2)), latent.pack_heads(values_NVR)

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        values_TNV = self._attend(x_TD, step, views)
        self.context.linear_method.apply(values_TNV, self.linears["out"], out_TD)

    def run_normed(self, norm_D: torch.Tensor, eps: float, step: StepInputs, views: TokenViews) -> None:
        ops.rms_norm(views.residual_TD, norm_D, eps, views.normed_TD)
        self.add_to_residual(self._attend(views.normed_TD, step, views), self.linears["out"], views)

    def _attend(self, x_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> torch.Tensor:
        """The heads' values [T, N * V]."""
        mixer, method, tokens = self.mixer, self.context.linear_method, len(x_TD)
        if self._to_latent is None or self._to_values is None:
            raise RuntimeError("latent attention was used before its weights were there")
        first_TC, q_latent_TC, latent_TC, absorbed_TC = _side_by_side(views.wide(self.wide), self._parts)
        q_TC = first_TC.view(-1)[: tokens * self.heads * _query_dim(mixer)].view(tokens, -1)
        if mixer.q_rank:
            method.apply(x_TD, self.linears["q_a"], q_latent_TC)
            ops.rms_norm(q_latent_TC, self.norms["q_a_norm"].weight, mixer.norm.eps, q_latent_TC)
            method.apply(q_latent_TC, self.linears["q_b"], q_TC)
        else:
            method.apply(x_TD, self.linears["q"], q_TC)
        method.apply(x_TD, self.linears["kv_a"], latent_TC)
        flat, heads = absorbed_TC.view(-1), (self.heads, -1)
        absorbed_TC = flat[: tokens * self.heads * self.columns].view(tokens, -1)
        q_TNQ, absorbed_TNC = q_TC.unflatten(1, heads), absorbed_TC.unflatten(1, heads)
        metadata, norm_R = step.attention[self._group], self.norms["kv_a_norm"].weight
        latent.head_linear(q_TNQ[..., : mixer.nope_dim], self._to_latent, absorbed_TNC[..., : mixer.kv_rank])
        latent.latent_and_cache(
            q_TNQ[..., mixer.nope_dim :], latent_TC, norm_R, mixer.norm.eps, self.rope, self._kv_cache, metadata,
            absorbed_TNC[..., mixer.kv_rank :], self.params.k_scale,
        )  # fmt: skip
        if self._growth_L is not None:
            scale_rows(absorbed_TC, self._growth_L, step.positions[:tokens])
        attended_TC = views.narrow(self.heads * mixer.kv_rank)
        self._attend_pages(x_TD, q_latent_TC, absorbed_TC, metadata, attended_TC)
        values_TC = first_TC.view(-1)[: tokens * self.heads * mixer.value_dim].view(tokens, -1)
        latent.head_linear(attended_TC.unflatten(1, heads), self._to_values, values_TC.unflatten(1, heads))
        if mixer.head_gate:
            gate_TN = views.wide(self.wide).view(-1)[tokens * sum(self._parts) :].view(tokens, self.heads)
            method.apply(x_TD, self.linears["head_gate"], gate_TN)
            recurrent.gate(values_TC, gate_TN, "sigmoid", values_TC)
        if mixer.output_gate:
            gate_TC = flat[: values_TC.numel()].view(tokens, -1)
            method.apply(x_TD, self.linears["gate"], gate_TC)
            recurrent.gate(values_TC, gate_TC, "sigmoid", values_TC)
        return values_TC

    def _attend_pages(
        self,
        x_TD: torch.Tensor,
        q_latent_TC: torch.Tensor,
        absorbed_TC: torch.Tensor,
        metadata: AttentionMetadata,
        out_TC: torch.Tensor,
    ) -> None:
        """Attention over the latents, this step's included, for absorbed queries; the layer's input and the queries' latent are
        there for those that choose tokens by them."""
        self.context.backend.forward(absorbed_TC, self._kv_cache, metadata, self.params, out_TC)


def plain_columns(weight: LinearWeight, context: LayerContext) -> torch.Tensor:
    """A matrix' columns as rows [in, out], whatever format it is in: they are the images of unit vectors."""
    if getattr(weight, "input_scale", None) is not None:  # made for real inputs, not for unit vectors
        weight = dataclasses.replace(weight, input_scale=None)  # type: ignore[call-arg]
    count, dtype = weight.in_features, context.activation_dtype
    units = torch.eye(count, dtype=dtype, device=context.device)
    columns_KN = torch.empty(count, weight.out_features, dtype=dtype, device=context.device)
    for start in range(0, count, context.max_tokens):
        rows = slice(start, min(start + context.max_tokens, count))
        context.linear_method.apply(units[rows], weight, columns_KN[rows])
    return columns_KN.to(context.dtype)


def _query_dim(mixer: MLA) -> int:
    return mixer.nope_dim + mixer.rope.rotary_dim


def _local_heads(mixer: MLA, plan: ParallelPlan) -> int:
    heads = plan.groups(mixer.heads, "heads")
    return heads.stop - heads.start


def _side_by_side(buffer_TC: torch.Tensor, columns: Sequence[int]) -> list[torch.Tensor]:
    """Contiguous [T, columns] one after the other in a buffer."""
    tokens = len(buffer_TC)
    parts = buffer_TC.view(-1)[: tokens * sum(columns)].split([tokens * count for count in columns])
    return [part.view(tokens, count) for part, count in zip(parts, columns, strict=True)]
