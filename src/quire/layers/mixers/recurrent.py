"""Recurrent mixers: lightning attention, Griffin's recurrent block, LFM2's short convolution, RWKV-4's two halves; Gated DeltaNet
and Kimi Delta Attention, whose heads have a state that is corrected toward each key's value, and forgets.

Legend: T tokens, D hidden, N heads (of values), K heads of queries and keys, H size of a (value) head, S size of a key head, C
channels of all heads, I intermediate, R columns between two matrices.
"""

import functools
from collections.abc import Iterator

import torch
from torch.nn.functional import softplus

from quire.kernels import latent, ops, recurrent
from quire.kernels.types import DeltaWeights, LruWeights, SsdWeights
from quire.layers.activation import kernel_activation
from quire.layers.assembly import Weight
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.interface import PagedState, StateLayer, rms_norm_over_ranks
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.workspace import TokenViews
from quire.models.spec import ChannelMix, DeltaNet, KimiDelta, Lightning, RgLru, ShortConv, TimeMix


class LightningLayer(StateLayer):
    """Lightning attention: linear attention whose heads forget at fixed rates.

    It is Mamba-2's scan with keys and queries in the places of B and C, a time step of 1, and decays that no weight holds. A
    state is a matrix [H, H] a head."""

    OUT = "lightning_out"

    def __init__(self, mixer: Lightning, context: LayerContext) -> None:
        mine, size = context.plan.groups(mixer.heads, "heads"), mixer.head_dim
        self.mixer, self.heads = mixer, context.plan.share(mixer.heads, "heads")
        self.inner = self.heads * size
        super().__init__(mixer, context, (self.heads, size, size))
        self.wide, self.narrow = 4 * self.inner, self.inner
        self._steps_1N = torch.zeros(1, self.heads, device=context.device)
        nothing_N = torch.zeros(self.heads, device=context.device)
        decays_N = torch.tensor(mixer.decays[mine], dtype=torch.float32, device=context.device)
        self._weights = SsdWeights(decays_N, nothing_N, nothing_N, dt_min=1.0, dt_max=1.0)

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Lightning) -> Iterator[Module]:
        inner = RowBlock(mixer.heads * mixer.head_dim, mixer.heads)
        layouts = builder.layouts("lightning_in", 4, (0, 1, 2), mixer.heads)
        yield builder.linear("lightning_in", (inner, inner, inner, inner), shard="rows", layouts=layouts)
        yield builder.table("lightning_norm", (inner,), shard="rows")
        yield builder.linear("lightning_out", (builder.hidden,), inner.rows, shard="columns", groups=mixer.heads)

    def mix(self, x: HalfInput, step: StepInputs, views: TokenViews) -> torch.Tensor:
        projected_TC, y_TC = views.wide(self.wide), views.narrow(self.inner)
        x.multiply(self.linears["lightning_in"], projected_TC, views)
        qkv_TC, gate_TC = projected_TC.split((3 * self.inner, self.inner), dim=1)
        recurrent.gate(qkv_TC, qkv_TC, "sigmoid", qkv_TC)  # x * sigmoid(x): SiLU
        by_head = (self.heads, self.mixer.head_dim)
        q_TNH, k_TNH, v_TNH = (part.unflatten(1, by_head) for part in qkv_TC.chunk(3, dim=1))
        steps_TN, out_TNH = self._steps_1N.expand(len(y_TC), -1), y_TC.unflatten(1, by_head)
        states, metadata = self.states[0], self.metadata(step)
        recurrent.ssd_scan(v_TNH, steps_TN, k_TNH, q_TNH, self._weights, states, metadata, out_TNH)
        weight_C, eps = self.tensors["lightning_norm"], self.mixer.norm.eps
        if self.context.plan.size > 1:
            rms_norm_over_ranks(self.context.communicator, (y_TC,), (weight_C,), eps)
            recurrent.gate(y_TC, gate_TC, "sigmoid", y_TC)
        else:
            recurrent.gated_norm(y_TC, gate_TC, weight_C, eps, self.inner, True, y_TC, "sigmoid")
        return y_TC


STRENGTH = 8.0
"""How much faster than by its parameter a channel forgets at most."""
GATES = ("lru_input_gate", "lru_forget_gate")


class RgLruLayer(StateLayer):
    """Griffin's recurrent block: a short convolution, gates by head, a linear recurrence by channel, and a second branch that
    multiplies the result. A state is the last inputs of the convolution and one number a channel."""

    OUT = "lru_out"

    def __init__(self, mixer: RgLru, context: LayerContext) -> None:
        self.mixer, self.heads = mixer, context.plan.share(mixer.heads, "heads")
        self.channels = self.heads * (mixer.channels // mixer.heads)
        super().__init__(mixer, context, (mixer.conv - 1, self.channels), (1, self.channels))
        self.activation = kernel_activation(mixer.act)
        self.wide, self.narrow = 5 * self.channels, self.channels

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: RgLru) -> Iterator[Module]:
        inner = RowBlock(mixer.channels, mixer.heads)
        yield builder.linear("lru_x", (inner,), bias=True, shard="rows")
        yield builder.linear("lru_y", (inner,), bias=True, shard="rows")
        yield builder.table("lru_conv", (inner,), mixer.conv, shard="rows", is_conv=True)
        yield builder.table("lru_conv_bias", (inner,), shard="rows")
        for gate in GATES:
            yield builder.table(gate, (inner,), mixer.channels // mixer.heads, shard="rows")
            yield builder.table(f"{gate}_bias", (inner,), shard="rows")
        yield builder.table("lru_decay", (inner,), shard="rows")
        yield builder.linear("lru_out", (builder.hidden,), inner.rows, bias=True, shard="columns", groups=mixer.heads)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name in GATES and isinstance(weight, torch.Tensor):  # [C, H]: of each head its inputs by its outputs
            heads_NHH = weight.unflatten(0, (self.heads, -1)).transpose(1, 2).contiguous()
            self.head_weights[name] = latent.pack_heads(heads_NHH.to(self.context.dtype))
        elif name == "lru_decay" and isinstance(weight, torch.Tensor):
            self.tensors[name] = -STRENGTH * softplus(weight)
        else:
            super().set_weight(name, weight)

    def mix(self, x: HalfInput, step: StepInputs, views: TokenViews) -> torch.Tensor:
        metadata, tensors = self.metadata(step), self.tensors
        conv_states, states = self.states
        raw_TC, x_TC, input_TC, forget_TC, by_TC = views.side_by_side(*(self.channels,) * 5)
        y_TC = views.narrow(self.channels)
        x.multiply(self.linears["lru_x"], raw_TC, views)
        x.multiply(self.linears["lru_y"], by_TC, views)
        recurrent.causal_conv(
            raw_TC, tensors["lru_conv"], tensors["lru_conv_bias"], "identity", conv_states, metadata, x_TC
        )
        by_head = (self.heads, -1)
        for gate, out_TC in zip(GATES, (input_TC, forget_TC), strict=True):
            latent.head_linear(x_TC.unflatten(1, by_head), self.head_weights[gate], out_TC.unflatten(1, by_head))
        recurrent.rg_lru(x_TC, input_TC, forget_TC, self._channel_weights, states, metadata, y_TC)
        ops.activation(by_TC, self.activation)
        recurrent.gate(y_TC, by_TC, "identity", y_TC)
        return y_TC

    @functools.cached_property
    def _channel_weights(self) -> LruWeights:
        return LruWeights(self.tensors["lru_decay"], *(self.tensors[f"{gate}_bias"] for gate in GATES))


class ShortConvLayer(StateLayer):
    """LFM2's gated short convolution: y = c * conv(b * x), with b, c and x of one matrix.

    A state is the last inputs of the convolution."""

    OUT = "conv_out"

    def __init__(self, mixer: ShortConv, context: LayerContext) -> None:
        self.channels = context.plan.share(context.hidden, "channels of the convolution")
        super().__init__(mixer, context, (mixer.conv - 1, self.channels))
        self.wide, self.narrow = 3 * self.channels, self.channels

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: ShortConv) -> Iterator[Module]:
        inner = RowBlock(builder.hidden.rows, builder.hidden.rows)
        yield builder.linear("conv_in", (inner, inner, inner), bias=mixer.bias, shard="rows")
        yield builder.table("conv", (inner,), mixer.conv, shard="rows", is_conv=True)
        if mixer.bias:
            yield builder.table("conv_bias", (inner,), shard="rows")
        yield builder.linear(
            "conv_out", (builder.hidden,), inner.rows, bias=mixer.bias, shard="columns", groups=inner.rows
        )

    def mix(self, x: HalfInput, step: StepInputs, views: TokenViews) -> torch.Tensor:
        y_TC, projected_TC = views.narrow(self.channels), views.wide(self.wide)
        x.multiply(self.linears["conv_in"], projected_TC, views)
        b_TC, c_TC, x_TC = projected_TC.chunk(3, dim=1)
        recurrent.gate(x_TC, b_TC, "identity", x_TC)
        recurrent.causal_conv(
            x_TC,
            self.tensors["conv"],
            self.tensors.get("conv_bias"),
            "identity",
            self.states[0],
            self.metadata(step),
            y_TC,
        )
        recurrent.gate(y_TC, c_TC, "identity", y_TC)
        return y_TC


class _Mixing(PagedState):
    """A half of an RWKV-4 layer: mixes each token with the one before it, by a convolution over two tokens whose weights add up
    to 1. A state begins with the last input, once for each way of mixing, since each convolution keeps its own."""

    def set_weight(self, name: str, weight: Weight) -> None:
        if "_mix_" in name and isinstance(weight, torch.Tensor):
            weight = torch.stack((1 - weight, weight), dim=1)  # of the token before, and of the token
        super().set_weight(name, weight)

    def _mix(self, name: str, number: int, x_TD: torch.Tensor, step: StepInputs, out_TD: torch.Tensor) -> torch.Tensor:
        weight_2D = self.tensors[name]
        recurrent.causal_conv(x_TD, weight_2D, None, "identity", self.states[number], self.metadata(step), out_TD)
        return out_TD


class TimeMixLayer(_Mixing):
    """RWKV-4's attention: a weighted mean over all tokens. A state is three last inputs, and the sums of that mean."""

    MIXED = ("key", "value", "receptance")

    def __init__(self, mixer: TimeMix, context: LayerContext) -> None:
        self.channels, last = context.plan.share(mixer.channels, "channels of time mixing"), (1, context.hidden)
        super().__init__(mixer, context, last, last, last, (3, self.channels))
        self.hidden = context.hidden
        self.wide, self.narrow = context.hidden + 3 * self.channels, self.channels

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: TimeMix) -> Iterator[Module]:
        inner = RowBlock(mixer.channels, mixer.channels)
        for name in TimeMixLayer.MIXED:
            yield builder.table(f"time_mix_{name}", (builder.hidden,))
            yield builder.linear(f"time_{name}", (inner,), shard="rows")
        yield builder.table("time_decay", (inner,), shard="rows")
        yield builder.table("time_first", (inner,), shard="rows")
        yield builder.linear("time_out", (builder.hidden,), inner.rows, shard="columns", groups=inner.rows)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "time_decay" and isinstance(weight, torch.Tensor):
            weight = -weight.exp()
        super().set_weight(name, weight)

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        mixed_TD, *parts = views.side_by_side(self.hidden, *(self.channels,) * 3)
        method, y_TC = self.context.linear_method, views.narrow(self.channels)
        for number, (name, part_TC) in enumerate(zip(self.MIXED, parts, strict=True)):
            self._mix(f"time_mix_{name}", number, x.tensor(views), step, mixed_TD)
            method.apply(mixed_TD, self.linears[f"time_{name}"], part_TC)
        k_TC, v_TC, gate_TC = parts
        decay_C, first_C = self.tensors["time_decay"], self.tensors["time_first"]
        recurrent.wkv(k_TC, v_TC, decay_C, first_C, self.states[3], self.metadata(step), y_TC)
        recurrent.gate(y_TC, gate_TC, "sigmoid", y_TC)
        out.multiply(y_TC, self.linears["time_out"], views)


class ChannelMixLayer(_Mixing):
    """RWKV-4's feed-forward. A state is two last inputs."""

    def __init__(self, mixer: ChannelMix, context: LayerContext) -> None:
        last = (1, context.hidden)
        super().__init__(mixer, context, last, last)
        self.width, self.hidden = context.plan.share(mixer.intermediate, "columns of a feed-forward"), context.hidden
        self.wide, self.narrow = 2 * context.hidden, self.width

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: ChannelMix) -> Iterator[Module]:
        wide = RowBlock(mixer.intermediate, mixer.intermediate)
        yield builder.table("channel_mix_key", (builder.hidden,))
        yield builder.table("channel_mix_receptance", (builder.hidden,))
        yield builder.linear("channel_key", (wide,), shard="rows")
        yield builder.linear("channel_receptance", (builder.hidden,))
        yield builder.linear("channel_value", (builder.hidden,), wide.rows, shard="columns", groups=wide.rows)

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        mixed_TD, gate_TD = views.side_by_side(self.hidden, self.hidden)
        method, activated_TI = self.context.linear_method, views.narrow(self.width)
        self._mix("channel_mix_receptance", 1, x.tensor(views), step, mixed_TD)
        method.apply(mixed_TD, self.linears["channel_receptance"], gate_TD)
        self._mix("channel_mix_key", 0, x.tensor(views), step, mixed_TD)
        method.apply(mixed_TD, self.linears["channel_key"], activated_TI)
        ops.activation(activated_TI, "relu2")
        out.multiply(activated_TI, self.linears["channel_value"], views)
        recurrent.gate(out.tensor(views), gate_TD, "sigmoid", out.tensor(views))


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
