"""Gated DeltaNet as a layer's mixer: heads whose state is corrected toward each key's value, and forgets by a gate.

Legend: T tokens, D hidden, N heads of values, K heads of queries and keys, H size of a value head, S size of a key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from quire.kernels import recurrent
from quire.kernels.types import DeltaWeights
from quire.layers.interface import StepInputs
from quire.layers.mixers.interface import LayerContext
from quire.layers.mixers.state import Read, StateLayer
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.workspace import TokenViews
from quire.models.spec import DeltaNet

if TYPE_CHECKING:
    from quire.layers.assembly import Weight


class DeltaNetLayer(StateLayer):
    """A state is the last inputs of the convolution and a matrix [S, H] a head."""

    NAMES = frozenset(("delta_in", "delta_ba", "delta_conv", "delta_a_log", "delta_dt_bias", "delta_norm", "delta_out"))

    OUT = "delta_out"

    def __init__(self, mixer: DeltaNet, context: LayerContext) -> None:
        size = context.plan.size
        self.mixer, self.key_heads, self.heads = mixer, mixer.key_heads // size, mixer.heads // size
        self.keys, self.inner = self.key_heads * mixer.key_dim, self.heads * mixer.head_dim
        self.mixed = 2 * self.keys + self.inner
        super().__init__(mixer, context, (mixer.conv - 1, self.mixed), (self.heads, mixer.key_dim, mixer.head_dim))
        self.columns = (self.mixed + self.inner, 2 * self.heads, self.mixed)
        self.wide, self.narrow = sum(self.columns), self.inner
        self._weights: DeltaWeights | None = None

    @staticmethod
    def modules(scope: LayerScope, mixer: DeltaNet) -> Iterator[Module]:
        keys = Part(mixer.key_heads * mixer.key_dim, mixer.key_heads)
        inner, heads = Part(mixer.heads * mixer.head_dim, mixer.key_heads), Part(mixer.heads, mixer.key_heads)
        turns = mixer.key_heads if "delta_in" in scope.spec.weights.by_head else 1
        deals = scope.deals("delta_in", 4, (0, 1, 2), turns)
        yield scope.linear("delta_in", (keys, keys, inner, inner), shard="rows", deals=deals)
        yield scope.linear("delta_ba", (heads, heads), shard="rows", deals=scope.deals("delta_ba", 2, (), turns))
        yield scope.table("delta_conv", (keys, keys, inner), mixer.conv, shard="rows", is_conv=True)
        yield scope.table("delta_a_log", (heads,), shard="rows")
        yield scope.table("delta_dt_bias", (heads,), shard="rows")
        yield scope.table("delta_norm", (Part(mixer.head_dim, 1),))
        yield scope.linear("delta_out", (scope.hidden,), inner.rows, shard="columns", groups=mixer.key_heads)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "delta_norm" and isinstance(weight, torch.Tensor):  # one for all heads
            weight = weight.repeat(self.heads)
        super().set_weight(name, weight)

    def mix(self, read: Read, step: StepInputs, views: TokenViews) -> torch.Tensor:
        mixer, metadata = self.mixer, self.metadata(step)
        conv_states, states = self.states
        projected_TC, ba_TC, mixed_TC = self.room(views, *self.columns)
        y_TC = views.narrow(self.inner)
        read("delta_in", projected_TC)
        read("delta_ba", ba_TC)
        raw_TC, gate_TC = projected_TC.split((self.mixed, self.inner), dim=1)
        recurrent.causal_conv(raw_TC, self.tensors["delta_conv"], None, "silu", conv_states, metadata, mixed_TC)
        q_TC, k_TC, v_TC = mixed_TC.split((self.keys, self.keys, self.inner), dim=1)
        b_TN, a_TN = ba_TC.chunk(2, dim=1)
        by_key, by_head = (self.key_heads, mixer.key_dim), (self.heads, mixer.head_dim)
        recurrent.gated_delta_rule(
            q_TC.unflatten(1, by_key), k_TC.unflatten(1, by_key), v_TC.unflatten(1, by_head), a_TN, b_TN,
            self._head_weights(), states, metadata, y_TC.unflatten(1, by_head),
        )  # fmt: skip
        recurrent.gated_norm(y_TC, gate_TC, self.tensors["delta_norm"], mixer.norm.eps, mixer.head_dim, True, y_TC)
        return y_TC

    def _head_weights(self) -> DeltaWeights:
        if self._weights is None:
            self._weights = DeltaWeights(
                self.tensors["delta_a_log"], self.tensors["delta_dt_bias"], self.mixer.beta_scale
            )
        return self._weights
