"""Gated DeltaNet and Kimi Delta Attention as layers' mixers: heads whose state is corrected toward each key's value, and forgets.

Legend: T tokens, D hidden, N heads (of values), K heads of queries and keys, H size of a (value) head, S size of a key head, C
channels of all heads, R columns between two matrices.
"""

import functools
from collections.abc import Iterator

import torch

from quire.kernels import recurrent
from quire.kernels.types import DeltaWeights
from quire.layers.assembly import Weight
from quire.layers.half import HalfInput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.state import StateLayer
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.workspace import TokenViews
from quire.models.spec import DeltaNet, KimiDelta


class DeltaLayer(StateLayer):
    """What both kinds have in common. `heads` is the number of this rank's."""

    OUT = "delta_out"
    heads: int

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "delta_norm" and isinstance(weight, torch.Tensor):  # one for all heads
            weight = weight.repeat(self.heads)
        super().set_weight(name, weight)


class DeltaNetLayer(DeltaLayer):
    """Gated DeltaNet. A state is the last inputs of the convolution and a matrix [S, H] a head."""

    def __init__(self, mixer: DeltaNet, context: LayerContext) -> None:
        size = context.plan.size
        self.mixer, self.key_heads, self.heads = mixer, mixer.key_heads // size, mixer.heads // size
        self.keys, self.inner = self.key_heads * mixer.key_dim, self.heads * mixer.head_dim
        self.mixed = 2 * self.keys + self.inner
        super().__init__(mixer, context, (mixer.conv - 1, self.mixed), (self.heads, mixer.key_dim, mixer.head_dim))
        self.columns = (self.mixed + self.inner, 2 * self.heads, self.mixed)
        self.wide, self.narrow = sum(self.columns), self.inner

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: DeltaNet) -> Iterator[Module]:
        keys = RowBlock(mixer.key_heads * mixer.key_dim, mixer.key_heads)
        inner, heads = RowBlock(mixer.heads * mixer.head_dim, mixer.key_heads), RowBlock(mixer.heads, mixer.key_heads)
        turns = mixer.key_heads if "delta_in" in builder.spec.weights.by_head else 1
        layouts = builder.layouts("delta_in", 4, (0, 1, 2), turns)
        yield builder.linear("delta_in", (keys, keys, inner, inner), shard="rows", layouts=layouts)
        yield builder.linear(
            "delta_ba", (heads, heads), shard="rows", layouts=builder.layouts("delta_ba", 2, (), turns)
        )
        yield builder.table("delta_conv", (keys, keys, inner), mixer.conv, shard="rows", is_conv=True)
        yield builder.table("delta_a_log", (heads,), shard="rows")
        yield builder.table("delta_dt_bias", (heads,), shard="rows")
        yield builder.table("delta_norm", (RowBlock(mixer.head_dim, 1),))
        yield builder.linear("delta_out", (builder.hidden,), inner.rows, shard="columns", groups=mixer.key_heads)

    def mix(self, x: HalfInput, step: StepInputs, views: TokenViews) -> torch.Tensor:
        mixer, metadata = self.mixer, self.metadata(step)
        conv_states, states = self.states
        projected_TC, ba_TC, mixed_TC = views.side_by_side(*self.columns)
        y_TC = views.narrow(self.inner)
        x.multiply(self.linears["delta_in"], projected_TC, views)
        x.multiply(self.linears["delta_ba"], ba_TC, views)
        raw_TC, gate_TC = projected_TC.split((self.mixed, self.inner), dim=1)
        recurrent.causal_conv(raw_TC, self.tensors["delta_conv"], None, "silu", conv_states, metadata, mixed_TC)
        q_TC, k_TC, v_TC = mixed_TC.split((self.keys, self.keys, self.inner), dim=1)
        b_TN, a_TN = ba_TC.chunk(2, dim=1)
        by_key, by_head = (self.key_heads, mixer.key_dim), (self.heads, mixer.head_dim)
        recurrent.gated_delta_rule(
            q_TC.unflatten(1, by_key),
            k_TC.unflatten(1, by_key),
            v_TC.unflatten(1, by_head),
            a_TN,
            b_TN,
            self._head_weights,
            states,
            metadata,
            y_TC.unflatten(1, by_head),
        )
        recurrent.gated_norm(y_TC, gate_TC, self.tensors["delta_norm"], mixer.norm.eps, mixer.head_dim, True, y_TC)
        return y_TC

    @functools.cached_property
    def _head_weights(self) -> DeltaWeights:
        return DeltaWeights(self.tensors["delta_a_log"], self.tensors["delta_dt_bias"], self.mixer.beta_scale)


class KimiDeltaLayer(DeltaLayer):
    """Gated DeltaNet whose heads forget each number of their state by a gate of its own.

    A state is the last inputs of the convolution and a matrix [H, H] a head."""

    def __init__(self, mixer: KimiDelta, context: LayerContext) -> None:
        self.mixer, self.heads = mixer, context.plan.share(mixer.heads, "heads")
        self.inner, size = self.heads * mixer.head_dim, mixer.head_dim
        super().__init__(mixer, context, (mixer.conv - 1, 3 * self.inner), (self.heads, size, size))
        self.columns = (3 * self.inner, 3 * self.inner, self.inner, self.inner, self.heads)
        self.rank = max(mixer.decay_rank, mixer.gate_rank)
        self.wide, self.narrow = sum(self.columns) + self.rank, self.inner

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: KimiDelta) -> Iterator[Module]:
        inner, heads = RowBlock(mixer.heads * mixer.head_dim, mixer.heads), RowBlock(mixer.heads, mixer.heads)
        yield builder.linear("delta_in", (inner, inner, inner), shard="rows")
        yield builder.linear("delta_b", (heads,), shard="rows")
        for name, rank in (("delta_decay", mixer.decay_rank), ("delta_gate", mixer.gate_rank)):
            if rank:
                yield builder.linear(name, (RowBlock(rank, 1),))
                yield builder.linear(f"{name}_out", (inner,), rank, shard="rows")
            else:
                yield builder.linear(name, (inner,), shard="rows")
        yield builder.table("delta_conv", (inner, inner, inner), mixer.conv, shard="rows", is_conv=True)
        yield builder.table("delta_a_log", (heads,), shard="rows")
        yield builder.table("delta_dt_bias", (inner,), shard="rows")
        yield builder.table("delta_norm", (RowBlock(mixer.head_dim, 1),))
        yield builder.linear("delta_out", (builder.hidden,), inner.rows, shard="columns", groups=mixer.heads)

    def mix(self, x: HalfInput, step: StepInputs, views: TokenViews) -> torch.Tensor:
        mixer, metadata = self.mixer, self.metadata(step)
        conv_states, states = self.states
        raw_TC, mixed_TC, decay_TC, gate_TC, b_TN, low_TR = views.side_by_side(*self.columns, self.rank)
        y_TC = views.narrow(self.inner)
        x.multiply(self.linears["delta_in"], raw_TC, views)
        x.multiply(self.linears["delta_b"], b_TN, views)
        self._read_twice(x, "delta_decay", mixer.decay_rank, low_TR, decay_TC, views)
        self._read_twice(x, "delta_gate", mixer.gate_rank, low_TR, gate_TC, views)
        recurrent.causal_conv(raw_TC, self.tensors["delta_conv"], None, "silu", conv_states, metadata, mixed_TC)
        by_head = (self.heads, mixer.head_dim)
        q_TNH, k_TNH, v_TNH = (part.unflatten(1, by_head) for part in mixed_TC.chunk(3, dim=1))
        recurrent.gated_delta_rule(
            q_TNH,
            k_TNH,
            v_TNH,
            decay_TC.unflatten(1, by_head),
            b_TN,
            self._head_weights,
            states,
            metadata,
            y_TC.unflatten(1, by_head),
        )
        norm = (self.tensors["delta_norm"], mixer.norm.eps, mixer.head_dim, True)
        recurrent.gated_norm(y_TC, gate_TC, *norm, y_TC, "sigmoid")
        return y_TC

    def _read_twice(
        self, x: HalfInput, name: str, rank: int, low_TR: torch.Tensor, out_TC: torch.Tensor, views: TokenViews
    ) -> None:
        """By one matrix, or by two with `rank` columns between them."""
        if rank:
            low_TR = low_TR.view(-1)[: len(low_TR) * rank].view(len(low_TR), rank)
            x.multiply(self.linears[name], low_TR, views)
            self.context.linear_method.apply(low_TR, self.linears[f"{name}_out"], out_TC)
        else:
            x.multiply(self.linears[name], out_TC, views)

    @functools.cached_property
    def _head_weights(self) -> DeltaWeights:
        bias_NH = self.tensors["delta_dt_bias"].view(self.heads, -1)
        return DeltaWeights(self.tensors["delta_a_log"], bias_NH, floor=self.mixer.floor)
