"""Kimi Delta Attention as a layer's mixer: Gated DeltaNet whose heads forget each number of their state by a gate of its own.

Legend: T tokens, D hidden, N heads, H size of a head, C channels of all heads, R columns between two matrices.
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
from quire.models.spec import KimiDelta

if TYPE_CHECKING:
    from quire.layers.assembly import Weight


class KimiDeltaLayer(StateLayer):
    """A state is the last inputs of the convolution and a matrix [H, H] a head."""

    NAMES = frozenset(
        ("delta_in", "delta_b", "delta_decay", "delta_decay_out", "delta_gate", "delta_gate_out", "delta_conv", "delta_a_log",
         "delta_dt_bias", "delta_norm", "delta_out")
    )  # fmt: skip
    OUT = "delta_out"

    def __init__(self, mixer: KimiDelta, context: LayerContext) -> None:
        share = context.plan.groups(mixer.heads, "heads")
        self.mixer, self.heads = mixer, share.stop - share.start
        self.inner, size = self.heads * mixer.head_dim, mixer.head_dim
        super().__init__(mixer, context, (mixer.conv - 1, 3 * self.inner), (self.heads, size, size))
        self.columns = (3 * self.inner, 3 * self.inner, self.inner, self.inner, self.heads)
        self.rank = max(mixer.decay_rank, mixer.gate_rank)
        self.wide, self.narrow = sum(self.columns) + self.rank, self.inner
        self._weights: DeltaWeights | None = None

    @staticmethod
    def modules(scope: LayerScope, mixer: KimiDelta) -> Iterator[Module]:
        inner, heads = Part(mixer.heads * mixer.head_dim, mixer.heads), Part(mixer.heads, mixer.heads)
        yield scope.linear("delta_in", (inner, inner, inner), shard="rows")
        yield scope.linear("delta_b", (heads,), shard="rows")
        for name, rank in (("delta_decay", mixer.decay_rank), ("delta_gate", mixer.gate_rank)):
            if rank:
                yield scope.linear(name, (Part(rank, 1),))
                yield scope.linear(f"{name}_out", (inner,), rank, shard="rows")
            else:
                yield scope.linear(name, (inner,), shard="rows")
        yield scope.table("delta_conv", (inner, inner, inner), mixer.conv, shard="rows", is_conv=True)
        yield scope.table("delta_a_log", (heads,), shard="rows")
        yield scope.table("delta_dt_bias", (inner,), shard="rows")
        yield scope.table("delta_norm", (Part(mixer.head_dim, 1),))
        yield scope.linear("delta_out", (scope.hidden,), inner.rows, shard="columns", groups=mixer.heads)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "delta_norm" and isinstance(weight, torch.Tensor):  # one for all heads
            weight = weight.repeat(self.heads)
        super().set_weight(name, weight)

    def mix(self, read: Read, step: StepInputs, views: TokenViews) -> torch.Tensor:
        mixer, metadata = self.mixer, self.metadata(step)
        conv_states, states = self.states
        raw_TC, mixed_TC, decay_TC, gate_TC, b_TN, low_TR = self.room(views, *self.columns, self.rank)
        y_TC = views.narrow(self.inner)
        read("delta_in", raw_TC)
        read("delta_b", b_TN)
        self._read_twice(read, "delta_decay", mixer.decay_rank, low_TR, decay_TC)
        self._read_twice(read, "delta_gate", mixer.gate_rank, low_TR, gate_TC)
        recurrent.causal_conv(raw_TC, self.tensors["delta_conv"], None, "silu", conv_states, metadata, mixed_TC)
        by_head = (self.heads, mixer.head_dim)
        q_TNH, k_TNH, v_TNH = (part.unflatten(1, by_head) for part in mixed_TC.chunk(3, dim=1))
        recurrent.gated_delta_rule(
            q_TNH, k_TNH, v_TNH, decay_TC.unflatten(1, by_head), b_TN, self._head_weights(), states, metadata,
            y_TC.unflatten(1, by_head),
        )  # fmt: skip
        norm = (self.tensors["delta_norm"], mixer.norm.eps, mixer.head_dim, True)
        recurrent.gated_norm(y_TC, gate_TC, *norm, y_TC, "sigmoid")
        return y_TC

    def _read_twice(self, read: Read, name: str, rank: int, low_TR: torch.Tensor, out_TC: torch.Tensor) -> None:
        """By one matrix, or by two with `rank` columns between them."""
        if rank:
            low_TR = low_TR.view(-1)[: len(low_TR) * rank].view(len(low_TR), rank)
            read(name, low_TR)
            self.context.linear_method.apply(low_TR, self.linears[f"{name}_out"], out_TC)
        else:
            read(name, out_TC)

    def _head_weights(self) -> DeltaWeights:
        if self._weights is None:
            bias_NH = self.tensors["delta_dt_bias"].view(self.heads, -1)
            self._weights = DeltaWeights(self.tensors["delta_a_log"], bias_NH, floor=self.mixer.floor)
        return self._weights
