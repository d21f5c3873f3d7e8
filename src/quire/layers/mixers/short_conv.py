"""A gated short convolution as a layer's mixer (LFM2): y = c * conv(b * x), with b, c and x of one matrix.

Legend: T tokens, D hidden, C channels of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import recurrent
from quire.layers.interface import StepInputs
from quire.layers.mixers.interface import LayerContext
from quire.layers.mixers.state import Read, StateLayer
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.workspace import TokenViews
from quire.models.spec import ShortConv


class ShortConvLayer(StateLayer):
    """A state is the last inputs of the convolution."""

    NAMES = frozenset(("conv_in", "conv", "conv_bias", "conv_out"))
    OUT = "conv_out"

    def __init__(self, mixer: ShortConv, context: LayerContext) -> None:
        share = context.plan.groups(context.hidden, "channels of the convolution")
        self.channels = share.stop - share.start
        super().__init__(mixer, context, (mixer.conv - 1, self.channels))
        self.wide, self.narrow = 3 * self.channels, self.channels

    @staticmethod
    def modules(scope: LayerScope, mixer: ShortConv) -> Iterator[Module]:
        inner = Part(scope.hidden.rows, scope.hidden.rows)
        yield scope.linear("conv_in", (inner, inner, inner), bias=mixer.bias, shard="rows")
        yield scope.table("conv", (inner,), mixer.conv, shard="rows", is_conv=True)
        if mixer.bias:
            yield scope.table("conv_bias", (inner,), shard="rows")
        yield scope.linear("conv_out", (scope.hidden,), inner.rows, bias=mixer.bias, shard="columns", groups=inner.rows)

    def mix(self, read: Read, step: StepInputs, views: TokenViews) -> torch.Tensor:
        y_TC, projected_TC = views.narrow(self.channels), views.wide(self.wide)
        read("conv_in", projected_TC)
        b_TC, c_TC, x_TC = projected_TC.chunk(3, dim=1)
        recurrent.gate(x_TC, b_TC, "identity", x_TC)
        recurrent.causal_conv(
            x_TC,
            self.tensors["conv"],
            self.constant("conv_bias"),
            "identity",
            self.states[0],
            self.metadata(step),
            y_TC,
        )
        recurrent.gate(y_TC, c_TC, "identity", y_TC)
        return y_TC
