"""Griffin's recurrent block as a layer's mixer: a short convolution, gates by head, a linear recurrence by channel, and a second
branch that multiplies what comes out.

Legend: T tokens, D hidden, N heads, H channels of a head, C channels of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import softplus

from quire.kernels import latent, ops, recurrent
from quire.kernels.types import HeadWeight, LruWeights
from quire.layers.activation import kernel_activation
from quire.layers.interface import StepInputs
from quire.layers.mixers.interface import LayerContext
from quire.layers.mixers.state import Read, StateLayer
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.workspace import TokenViews
from quire.models.spec import RgLru

if TYPE_CHECKING:
    from quire.layers.assembly import Weight

STRENGTH = 8.0
"""How much faster than by its parameter a channel forgets at most."""
GATES = ("lru_input_gate", "lru_forget_gate")


class RgLruLayer(StateLayer):
    """A state is the last inputs of the convolution and one number a channel."""

    NAMES = frozenset(
        (
            "lru_x",
            "lru_y",
            "lru_conv",
            "lru_conv_bias",
            *GATES,
            *(f"{gate}_bias" for gate in GATES),
            "lru_decay",
            "lru_out",
        )
    )
    OUT = "lru_out"

    def __init__(self, mixer: RgLru, context: LayerContext) -> None:
        mine = context.plan.groups(mixer.heads, "heads")
        self.mixer, self.heads = mixer, mine.stop - mine.start
        self.channels = self.heads * (mixer.channels // mixer.heads)
        super().__init__(mixer, context, (mixer.conv - 1, self.channels), (1, self.channels))
        self.activation = kernel_activation(mixer.act)
        self.wide, self.narrow = 5 * self.channels, self.channels
        self._gates: dict[str, HeadWeight] = {}
        self._weights: LruWeights | None = None

    @staticmethod
    def modules(scope: LayerScope, mixer: RgLru) -> Iterator[Module]:
        inner = Part(mixer.channels, mixer.heads)
        yield scope.linear("lru_x", (inner,), bias=True, shard="rows")
        yield scope.linear("lru_y", (inner,), bias=True, shard="rows")
        yield scope.table("lru_conv", (inner,), mixer.conv, shard="rows", is_conv=True)
        yield scope.table("lru_conv_bias", (inner,), shard="rows")
        for gate in GATES:
            yield scope.table(gate, (inner,), mixer.channels // mixer.heads, shard="rows")
            yield scope.table(f"{gate}_bias", (inner,), shard="rows")
        yield scope.table("lru_decay", (inner,), shard="rows")
        yield scope.linear("lru_out", (scope.hidden,), inner.rows, bias=True, shard="columns", groups=mixer.heads)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name in GATES and isinstance(weight, torch.Tensor):  # [C, H]: of each head its inputs by its outputs
            heads_NHH = weight.unflatten(0, (self.heads, -1)).transpose(1, 2).contiguous()
            self._gates[name] = latent.pack_heads(heads_NHH.to(self.context.dtype))
        elif name == "lru_decay" and isinstance(weight, torch.Tensor):
            self.tensors[name] = -STRENGTH * softplus(weight)
        else:
            super().set_weight(name, weight)

    def mix(self, read: Read, step: StepInputs, views: TokenViews) -> torch.Tensor:
        metadata, tensors = self.metadata(step), self.tensors
        conv_states, states = self.states
        raw_TC, x_TC, input_TC, forget_TC, by_TC = self.room(views, *(self.channels,) * 5)
        y_TC = views.narrow(self.channels)
        read("lru_x", raw_TC)
        read("lru_y", by_TC)
        recurrent.causal_conv(
            raw_TC, tensors["lru_conv"], tensors["lru_conv_bias"], "identity", conv_states, metadata, x_TC
        )
        by_head = (self.heads, -1)
        for gate, out_TC in zip(GATES, (input_TC, forget_TC), strict=True):
            latent.head_linear(x_TC.unflatten(1, by_head), self._gates[gate], out_TC.unflatten(1, by_head))
        recurrent.rg_lru(x_TC, input_TC, forget_TC, self._channel_weights(), states, metadata, y_TC)
        ops.activation(by_TC, self.activation)
        recurrent.gate(y_TC, by_TC, "identity", y_TC)
        return y_TC

    def _channel_weights(self) -> LruWeights:
        if self._weights is None:
            biases = (self.tensors[f"{gate}_bias"] for gate in GATES)
            self._weights = LruWeights(self.tensors["lru_decay"], *biases)
        return self._weights
