"""Mamba (the first) as a layer's mixer: channels that decay each by itself, with time steps that depend on the token.

Legend: T tokens, D hidden, C channels, S state size, R columns of the time step before its own matrix, W width of the
convolution.
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
from quire.models.spec import Mamba


class MambaLayer(StateLayer):
    """A state is the last inputs of the convolution and S numbers a channel."""

    NAMES = frozenset(
        ("ssm_in", "ssm_conv", "ssm_conv_bias", "ssm_x", "ssm_dt", "ssm_a_log", "ssm_d", "ssm_out", "ssm_dt_norm",
         "ssm_b_norm", "ssm_c_norm")
    )  # fmt: skip

    OUT = "ssm_out"

    def __init__(self, mixer: Mamba, context: LayerContext) -> None:
        share = context.plan.groups(mixer.channels, "Mamba channels")
        self.mixer, self.channels = mixer, share.stop - share.start
        super().__init__(mixer, context, (mixer.conv - 1, self.channels), (mixer.state, self.channels))
        self.dt_b_c = (mixer.dt_rank, mixer.state, mixer.state)
        self.columns = (2 * self.channels, self.channels, sum(self.dt_b_c), mixer.dt_rank, self.channels)
        self.wide, self.narrow = sum(self.columns), self.channels
        if mixer.norm is not None and not mixer.norm_weights:
            for name, size in zip(("dt", "b", "c"), self.dt_b_c, strict=True):
                self.tensors[f"ssm_{name}_norm"] = torch.ones(size, device=context.device)

    @staticmethod
    def modules(scope: LayerScope, mixer: Mamba) -> Iterator[Module]:
        inner, sizes = Part(mixer.channels, mixer.channels), (mixer.dt_rank, mixer.state, mixer.state)
        yield scope.linear("ssm_in", (inner, inner), bias=mixer.bias, shard="rows")
        yield scope.table("ssm_conv", (inner,), mixer.conv, shard="rows", is_conv=True)
        if mixer.conv_bias:
            yield scope.table("ssm_conv_bias", (inner,), shard="rows")
        yield scope.linear("ssm_x", (Part(sum(sizes), 1),), inner.rows, shard="columns", groups=inner.rows)
        if mixer.norm is not None and mixer.norm_weights:
            for name, size in zip(("dt", "b", "c"), sizes, strict=True):
                yield scope.table(f"ssm_{name}_norm", (Part(size, 1),))
        yield scope.linear("ssm_dt", (inner,), mixer.dt_rank, bias=True, shard="rows")
        yield scope.table("ssm_a_log", (inner,), mixer.state, shard="rows")
        yield scope.table("ssm_d", (inner,), shard="rows")
        yield scope.linear("ssm_out", (scope.hidden,), inner.rows, bias=mixer.bias, shard="columns", groups=inner.rows)

    def mix(self, read: Read, step: StepInputs, views: TokenViews) -> torch.Tensor:
        metadata, method, tensors = self.metadata(step), self.context.linear_method, self.tensors
        conv_states, states = self.states
        projected_TC, mixed_TC, dt_b_c_TC, low_TR, dt_TC = self.room(views, *self.columns)
        y_TC = views.narrow(self.channels)
        read("ssm_in", projected_TC)
        raw_TC, gate_TC = projected_TC.chunk(2, dim=1)
        recurrent.causal_conv(
            raw_TC, tensors["ssm_conv"], self.constant("ssm_conv_bias"), "silu", conv_states, metadata, mixed_TC
        )
        method.apply(mixed_TC, self.linears["ssm_x"], dt_b_c_TC)
        self.context.communicator.all_reduce(dt_b_c_TC)
        raw_TR, b_TS, c_TS = dt_b_c_TC.split(self.dt_b_c, dim=1)
        if self.mixer.norm is None:
            recurrent.scale_columns(raw_TR, None, low_TR)
        else:
            eps = self.mixer.norm.eps
            for name, x, out in (("dt", raw_TR, low_TR), ("b", b_TS, b_TS), ("c", c_TS, c_TS)):
                recurrent.gated_norm(x, None, tensors[f"ssm_{name}_norm"], eps, x.shape[1], True, out)
        method.apply(low_TR, self.linears["ssm_dt"], dt_TC)
        recurrent.selective_scan(
            mixed_TC, dt_TC, b_TS, c_TS, tensors["ssm_a_log"], tensors["ssm_d"], states, metadata, y_TC
        )
        recurrent.gate(y_TC, gate_TC, "silu", y_TC)
        return y_TC
