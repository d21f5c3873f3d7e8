"""Attention over pages as a layer's mixer: one matrix in, the backend's work, one matrix out.

What backends do not know comes before or after them: norms of heads other than RMS with one weight, clipping, gates.
Legend: T tokens, D hidden, N query heads, K KV heads, H head size, C columns of q, k and v together, G norms side by side; A
axes, P pairs of a head.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.kernels import ops, recurrent
from quire.kernels.norm import clip, head_norm, scale_rows
from quire.kernels.types import Rope as RopeTable
from quire.layers.assembly import NormWeight, Weight
from quire.layers.half import HalfInput, HalfOutput, SampledViews
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.interface import MixerLayer, rms_norm_over_ranks
from quire.layers.modules import Module, ModuleBuilder, RowBlock, SourceLayout
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews
from quire.models.residual import LayerNorm, Norm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, Temperature


class AttentionLayer(MixerLayer):
    """Grouped-query attention."""

    can_fuse = True

    def __init__(self, mixer: Attention, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.mixer = mixer
        heads, kv_heads = self.shares(mixer, context.plan)
        self.params = AttentionParams(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
            window=mixer.window,
            chunk=mixer.chunk,
            soft_cap=mixer.soft_cap,
            causal=mixer.causal,
            sees_items=mixer.sees_items,
            deterministic=context.deterministic,
            alibi_slopes=_local_slopes(mixer, context),
        )
        self.rope = None if mixer.rope is None else rotary_table(mixer.rope, context)
        self.narrow = heads * mixer.head_dim
        self.can_fuse = mixer.out_scale == 1.0
        self.can_narrow = mixer.causal and context.plan.context == 1
        self._columns = (heads + 2 * kv_heads) * mixer.head_dim
        gates = heads if mixer.gate_span == "head" else self.narrow
        self.wide = self._columns + (gates if mixer.output_gate else 0)
        if mixer.qk_norm is not None and not mixer.qk_norm.weight:
            ones_H = torch.ones(mixer.head_dim, device=context.device)
            self.norms = {"q_norm": NormWeight(ones_H), "k_norm": NormWeight(ones_H)}
        # Where keys are normed before their rotation in the place of after it, that stretches what epsilon is compared with.
        self._stretch = float(self.rope.cos_sin[0, 0]) if mixer.qk_norm_after_rope and self.rope is not None else 1.0
        self._head_norms = self._weights_of_heads()
        self._ones_KH = torch.ones(kv_heads if mixer.v_norm is not None else 0, mixer.head_dim, device=context.device)
        self._growth_L = None if mixer.temperature is None else growth_table(mixer.temperature, context)
        self._kv_cache: torch.Tensor = torch.empty(0)
        self._group = 0

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        q, kv = (
            RowBlock(mixer.heads * mixer.head_dim, mixer.heads),
            RowBlock(mixer.kv_heads * mixer.head_dim, mixer.kv_heads),
        )
        name = "qkv"
        if mixer.k_is_v:
            name, parts, layouts = "qk", (q, kv, kv), (SourceLayout((0,)), SourceLayout((1,), twin=2))
        elif mixer.output_gate:
            gate = RowBlock(mixer.heads, mixer.heads) if mixer.gate_span == "head" else q
            parts, layouts = (q, kv, kv, gate), builder.layouts("qkv", 4, (0, 3), mixer.heads)
        else:
            parts, layouts = (q, kv, kv), builder.layouts("qkv", 3, (1, 2), mixer.kv_heads)
        is_apart = mixer.rope is not None and mixer.rope.in_halves
        turned = (mixer.heads + mixer.kv_heads, mixer.head_dim) if is_apart else (0, 0)
        linear = builder.linear(name, parts, bias=mixer.qkv_bias, shard="rows", layouts=layouts)
        yield dataclasses.replace(linear, apart=turned)
        if mixer.qk_norm is not None and mixer.qk_norm.weight:
            for norm, heads in (("q_norm", mixer.heads), ("k_norm", mixer.kv_heads)):
                is_all, is_each = mixer.qk_norm_span == "all", mixer.qk_norm_span == "heads"
                size = mixer.head_dim * (heads if is_all else 1)
                module = builder.norm(norm, mixer.qk_norm, size, heads if is_each else 0)
                yield dataclasses.replace(module, apart=(1, mixer.head_dim) if is_apart else (0, 0))
        if mixer.sinks:
            yield builder.vector("sinks", RowBlock(mixer.heads, mixer.heads), "rows")
        yield builder.linear("out", (builder.hidden,), q.rows, bias=mixer.out_bias, shard="columns", groups=mixer.heads)

    @staticmethod
    def shares(mixer: Attention, plan: ParallelPlan) -> tuple[int, int]:
        """This rank's heads and KV heads."""
        return plan.share(mixer.heads, "heads"), plan.share(mixer.kv_heads, "KV heads")

    @classmethod
    def attention_requests(
        cls, mixer: Attention, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        heads, kv_heads = cls.shares(mixer, plan)
        return [
            AttentionRequest(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=mixer.head_dim,
                kv_dtype=kv_dtype,
                block_size=block_size * (plan.context if mixer.is_local else 1),
                window=mixer.window,
                chunk=mixer.chunk,
                causal=mixer.causal,
                sees_items=mixer.sees_items,
                soft_cap=mixer.soft_cap,
                has_sinks=mixer.sinks,
                has_alibi=bool(mixer.alibi),
                deterministic=deterministic,
            )
        ]

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "sinks":
            self.params = dataclasses.replace(self.params, sinks=weight)
        else:
            super().set_weight("qkv" if name == "qk" else name, weight)
            self._head_norms = self._weights_of_heads()

    def set_cache_scale(self, name: str, scale: torch.Tensor) -> None:
        self.params = with_cache_scale(self.params, name, scale, self.context)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        context, params = self.context, self.params
        window = self.mixer.window or self.mixer.chunk
        window = window if self.mixer.causal else 0  # a whole prompt is one step: nothing falls behind
        behind = KVKind.CHUNKED_LOCAL if self.mixer.chunk else KVKind.SLIDING_WINDOW
        return [
            KVCacheSpec(
                kind=behind if window > 0 else KVKind.FULL,
                block_size=context.block_size,
                bytes_per_token=2 * params.num_kv_heads * params.head_dim * context.kv_dtype.itemsize,
                num_kv_heads=params.num_kv_heads,
                head_dim=params.head_dim,
                dtype=str(context.kv_dtype).removeprefix("torch."),
                window=window,
                ranks=1 if self.mixer.is_local else context.plan.context,
            )
        ]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        (self._kv_cache,), (self._group,) = kv_caches, groups

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        qkv_TC = views.wide(self.wide)
        x.multiply(self.linears["qkv"], qkv_TC, views)
        self.context.linear_method.adapt_keys(step.input_ids, self.linears["qkv"], qkv_TC)
        if out.sampled is None:
            attended_TC = views.narrow(self.narrow)
            self._attend(step, qkv_TC, attended_TC)
        else:
            attended_TC = self._attend_sampled(step, qkv_TC, out.sampled)
        if not len(attended_TC):  # no token of the step needs logits
            return
        out.multiply(attended_TC, self.linears["out"], views)
        if self.mixer.out_scale != 1.0:
            ops.scale_and_cap(out.tensor(views), self.mixer.out_scale, 0.0)

    def _attend(self, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        """Norms of heads, rotation, pages and attention: the backend's business, as far as it knows them."""
        whole_TC, qkv_TC = qkv_TC, qkv_TC[:, : self._columns] if self.mixer.output_gate else qkv_TC
        pages = self._pages(step)
        if not self.mixer.qk_norm_after_rope and self._growth_L is None:
            norms = self._prepare_heads(qkv_TC)
            self.context.backend.attend(qkv_TC, *pages, out_TNH, self.rope, *norms)
        else:
            self._rotate_and_cache(step, qkv_TC)
            self.context.backend.forward(qkv_TC, *pages, out_TNH)
        self._gate(whole_TC, out_TNH)

    def _attend_sampled(self, step: StepInputs, qkv_TC: torch.Tensor, few: SampledViews) -> torch.Tensor:
        """As `_attend`, for the tokens that need logits: [S, N * H]."""
        self._rotate_and_cache(step, qkv_TC[:, : self._columns] if self.mixer.output_gate else qkv_TC)
        sampled, out_SNH = cast(StepInputs, step.sampled), few.views.narrow(self.narrow)
        if not len(out_SNH):
            return out_SNH
        qkv_SC = few.rows
        ops.gather_rows(qkv_TC, step.logits_index[: len(qkv_SC)], qkv_SC)
        self.context.backend.forward(qkv_SC[:, : self._columns], *self._pages(sampled), out_SNH)
        self._gate(qkv_SC, out_SNH)
        return out_SNH

    def _pages(self, step: StepInputs) -> tuple[torch.Tensor, AttentionMetadata, AttentionParams]:
        return self._kv_cache, step.attention[self._group], self.params

    def _rotate_and_cache(self, step: StepInputs, qkv_TC: torch.Tensor) -> None:
        """Queries become what attention takes, keys and values go to their pages."""
        norms = self._prepare_heads(qkv_TC)
        self.context.backend.rope_and_cache(qkv_TC, *self._pages(step), self.rope, *norms)
        if self.mixer.qk_norm_after_rope:
            self._norm(qkv_TC[:, : self.narrow], self._head_norms[0])
        if self._growth_L is not None:
            scale_rows(qkv_TC[:, : self.narrow], self._growth_L, step.positions[: len(qkv_TC)])

    def _prepare_heads(self, qkv_TC: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        norms, v_norm = self._norm_heads(qkv_TC), self.mixer.v_norm
        if v_norm is not None:
            values_TKH = qkv_TC[:, (self.narrow + self._columns) // 2 : self._columns]
            head_norm(values_TKH, self._ones_KH, None, v_norm.eps, subtract_mean=False)
        if self.mixer.clip_qkv > 0:
            clip(qkv_TC, self.mixer.clip_qkv)
        return norms

    def _gate(self, whole_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        if self.mixer.output_gate:
            kind, gates_TG = self.mixer.gate_kind, whole_TC[:, self._columns :]
            if kind == "softplus":
                gates_TG.copy_(torch.nn.functional.softplus(gates_TG))
            recurrent.gate(out_TNH, gates_TG, "identity" if kind == "softplus" else kind, out_TNH)

    def _norm_heads(self, qkv_TC: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        """What precedes rotation: done here, or weights and epsilon for a backend that does it."""
        mixer, norm = self.mixer, self.mixer.qk_norm
        if norm is None:
            return None, None, 0.0
        if isinstance(norm, RMSNorm) and mixer.qk_norm_span == "head" and not mixer.qk_norm_after_rope:
            return self.norms["q_norm"].weight, self.norms["k_norm"].weight, norm.eps
        q_weight, k_weight = self._head_norms
        q_TNH, k_TKH = qkv_TC[:, : self.narrow], qkv_TC[:, self.narrow : (self.narrow + self._columns) // 2]
        if mixer.qk_norm_span == "all" and self.context.plan.size > 1:
            weights = (q_weight.weight, k_weight.weight)
            rms_norm_over_ranks(self.context.communicator, (q_TNH, k_TKH), weights, norm.eps)
        else:
            if not mixer.qk_norm_after_rope:
                self._norm(q_TNH, q_weight)
            self._norm(k_TKH, k_weight, self._stretch)
        return None, None, 0.0

    def _norm(self, x: torch.Tensor, weight: NormWeight, stretch: float = 1.0) -> None:
        norm = cast(Norm, self.mixer.qk_norm)
        head_norm(x, weight.weight, weight.bias, norm.eps / stretch**2, isinstance(norm, LayerNorm))

    def _weights_of_heads(self) -> tuple[NormWeight, ...]:
        """Weights [G, values] of this rank's query and key heads, once both are there; G norms side by side.

        An RMS norm and a rotation may change places but for the norm's weight. So where the norm comes second, keys are
        normed before rotation without their weight, which the queries' takes in: scores see only the product."""
        if len(self.norms) < 2:
            return ()
        mixer, plan, q_norm, k_norm = self.mixer, self.context.plan, self.norms["q_norm"], self.norms["k_norm"]
        if mixer.qk_norm_after_rope:
            q_norm = NormWeight(q_norm.weight * k_norm.weight / self._stretch)
            k_norm = NormWeight(torch.ones_like(k_norm.weight))
        return (
            _of_heads(q_norm, mixer, plan.groups(mixer.heads, "heads")),
            _of_heads(k_norm, mixer, plan.groups(mixer.kv_heads, "KV heads")),
        )


def _of_heads(norm: NormWeight, mixer: Attention, heads: slice) -> NormWeight:
    """A norm's weight and bias for a slice of heads, as [G, values]."""

    def of_heads(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        if mixer.qk_norm_span == "head":
            return values.expand(heads.stop - heads.start, -1).contiguous()
        mine_NH = values.view(-1, mixer.head_dim)[heads]
        return mine_NH.reshape(1, -1) if mixer.qk_norm_span == "all" else mine_NH.contiguous()

    return NormWeight(cast(torch.Tensor, of_heads(norm.weight)), of_heads(norm.bias))


def with_cache_scale(params: AttentionParams, name: str, scale: torch.Tensor, context: LayerContext) -> AttentionParams:
    """The constants with one of the scales of pages in float8; others have none, and a checkpoint marks a missing one by 0 or -1.

    Of one scale a head the largest serves all: no head's values go beyond the range, and those of 2^-6 of the scale and more
    keep as many bits as by any other.
    """
    if context.kv_dtype != torch.float8_e4m3fn:
        return params
    value = float(scale.max())
    return dataclasses.replace(params, **{name: value}) if value > 0 else params


def rotary_table(rope: Rope, context: LayerContext) -> RopeTable:
    """The table of a rotation, made once for all layers that have it."""
    if rope not in context.tables:
        if rope.axes:  # a row for each token of the step, filled when its positions are known
            cos_sin = torch.zeros(context.max_tokens, rope.rotary_dim, device=context.device)
        else:
            cos_sin = rope.table(context.max_positions).to(context.device)
        context.tables[rope] = RopeTable(cos_sin, cos_sin.shape[1], rope.interleaved, bool(rope.axes))
    return context.tables[rope]


def _local_slopes(mixer: Attention, context: LayerContext) -> torch.Tensor | None:
    heads = context.plan.groups(mixer.heads, "heads")
    return torch.tensor(mixer.alibi[heads], dtype=torch.float32, device=context.device) if mixer.alibi else None


def growth_table(temperature: Temperature, context: LayerContext) -> torch.Tensor | None:
    """Each position's factor [L] on queries; None where no context is long enough for one."""
    if context.max_positions + temperature.offset <= temperature.length:
        return None
    positions_L = torch.arange(context.max_positions, dtype=torch.float32, device=context.device) + temperature.offset
    lengths_L = positions_L / temperature.length
    logs_L = torch.log1p(torch.floor(lengths_L)) if temperature.steps else torch.log(lengths_L.clamp(min=1.0))
    return 1.0 + temperature.growth * logs_L


class AxisTable:
    """Fills a table of `rotary_table` for ropes with axes. Kernels read a row of a table at a token's position; here the row is
    the token's own, filled once a step for all layers.

    Args:
        max_positions: as for other tables.
    """

    def __init__(self, rope: Rope, table: RopeTable, max_positions: int) -> None:
        frequencies_P, self._amplitude = rope.frequencies(max_positions)
        self._cos_sin, device = table.cos_sin, table.cos_sin.device
        self._frequencies_P, self._axes_P = frequencies_P.to(device), torch.tensor(rope.axes, device=device)
        self.num_axes = max(rope.axes) + 1

    def fill(self, step: StepInputs) -> None:
        """The rows of a step's tokens."""
        assert step.axes is not None, "this model's positions have several axes"
        rows, pairs = self._cos_sin[: step.num_tokens], len(self._frequencies_P)
        angles_TP = step.axes[: step.num_tokens].index_select(1, self._axes_P).float() * self._frequencies_P
        torch.mul(angles_TP.cos(), self._amplitude, out=rows[:, :pairs])
        torch.mul(angles_TP.sin(), self._amplitude, out=rows[:, pairs:])
