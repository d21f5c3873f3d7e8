"""The halves of RWKV-4's layers as mixers: both see the token before, and its attention sees all by a weighted mean.

A token is mixed with the one before it by a convolution over two tokens whose weights add up to 1.
Legend: T tokens, D hidden, C channels, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from quire.kernels import ops, recurrent
from quire.layers.interface import StepInputs
from quire.layers.mixers.interface import LayerContext
from quire.layers.mixers.state import PagedState
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.workspace import TokenViews
from quire.models.spec import ChannelMix, TimeMix

if TYPE_CHECKING:
    from quire.layers.assembly import Weight


class _Mixing(PagedState):
    """A state begins with the last input, once for each way of mixing, since each convolution keeps its own."""

    def set_weight(self, name: str, weight: Weight) -> None:
        if "_mix_" in name and isinstance(weight, torch.Tensor):
            weight = torch.stack((1 - weight, weight), dim=1)  # of the token before, and of the token
        super().set_weight(name, weight)

    def _mix(self, name: str, number: int, x_TD: torch.Tensor, step: StepInputs, out_TD: torch.Tensor) -> torch.Tensor:
        weight_2D = self.tensors[name]
        recurrent.causal_conv(x_TD, weight_2D, None, "identity", self.states[number], self.metadata(step), out_TD)
        return out_TD


class TimeMixLayer(_Mixing):
    """A state is three last inputs, and the sums of the weighted mean."""

    MIXED = ("key", "value", "receptance")
    NAMES = frozenset((*(f"time_mix_{name}" for name in MIXED), *(f"time_{name}" for name in MIXED), "time_decay",
                       "time_first", "time_out"))  # fmt: skip

    def __init__(self, mixer: TimeMix, context: LayerContext) -> None:
        mine = context.plan.groups(mixer.channels, "channels of time mixing")
        self.channels, last = mine.stop - mine.start, (1, context.hidden)
        super().__init__(mixer, context, last, last, last, (3, self.channels))
        self.hidden = context.hidden
        self.wide, self.narrow = context.hidden + 3 * self.channels, self.channels

    @staticmethod
    def modules(scope: LayerScope, mixer: TimeMix) -> Iterator[Module]:
        inner = Part(mixer.channels, mixer.channels)
        for name in TimeMixLayer.MIXED:
            yield scope.table(f"time_mix_{name}", (scope.hidden,))
            yield scope.linear(f"time_{name}", (inner,), shard="rows")
        yield scope.table("time_decay", (inner,), shard="rows")
        yield scope.table("time_first", (inner,), shard="rows")
        yield scope.linear("time_out", (scope.hidden,), inner.rows, shard="columns", groups=inner.rows)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "time_decay" and isinstance(weight, torch.Tensor):
            weight = -weight.exp()
        super().set_weight(name, weight)

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        mixed_TD, *parts = self.room(views, self.hidden, *(self.channels,) * 3)
        method, y_TC = self.context.linear_method, views.narrow(self.channels)
        for number, (name, part_TC) in enumerate(zip(self.MIXED, parts, strict=True)):
            self._mix(f"time_mix_{name}", number, x_TD, step, mixed_TD)
            method.apply(mixed_TD, self.linears[f"time_{name}"], part_TC)
        k_TC, v_TC, gate_TC = parts
        decay_C, first_C = self.tensors["time_decay"], self.tensors["time_first"]
        recurrent.wkv(k_TC, v_TC, decay_C, first_C, self.states[3], self.metadata(step), y_TC)
        recurrent.gate(y_TC, gate_TC, "sigmoid", y_TC)
        method.apply(y_TC, self.linears["time_out"], out_TD)


class ChannelMixLayer(_Mixing):
    """A state is two last inputs."""

    NAMES = frozenset(
        ("channel_mix_key", "channel_mix_receptance", "channel_key", "channel_receptance", "channel_value")
    )

    def __init__(self, mixer: ChannelMix, context: LayerContext) -> None:
        mine, last = context.plan.groups(mixer.intermediate, "columns of a feed-forward"), (1, context.hidden)
        super().__init__(mixer, context, last, last)
        self.width, self.hidden = mine.stop - mine.start, context.hidden
        self.wide, self.narrow = 2 * context.hidden, self.width

    @staticmethod
    def modules(scope: LayerScope, mixer: ChannelMix) -> Iterator[Module]:
        wide = Part(mixer.intermediate, mixer.intermediate)
        yield scope.table("channel_mix_key", (scope.hidden,))
        yield scope.table("channel_mix_receptance", (scope.hidden,))
        yield scope.linear("channel_key", (wide,), shard="rows")
        yield scope.linear("channel_receptance", (scope.hidden,))
        yield scope.linear("channel_value", (scope.hidden,), wide.rows, shard="columns", groups=wide.rows)

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        mixed_TD, gate_TD = self.room(views, self.hidden, self.hidden)
        method, activated_TI = self.context.linear_method, views.narrow(self.width)
        self._mix("channel_mix_receptance", 1, x_TD, step, mixed_TD)
        method.apply(mixed_TD, self.linears["channel_receptance"], gate_TD)
        self._mix("channel_mix_key", 0, x_TD, step, mixed_TD)
        method.apply(mixed_TD, self.linears["channel_key"], activated_TI)
        ops.activation(activated_TI, "relu2")
        method.apply(activated_TI, self.linears["channel_value"], out_TD)
        recurrent.gate(out_TD, gate_TD, "sigmoid", out_TD)
