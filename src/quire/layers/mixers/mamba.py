"""Mamba and Mamba-2 as layers' mixers: a short convolution and a scan, between one matrix in and one out.

Legend: T tokens, D hidden, C channels, N heads, H head size, G groups of heads, S state size, R columns of the time step before
its own matrix.
"""

import functools
from collections.abc import Iterator

import torch

from quire.kernels import ops, recurrent
from quire.kernels.types import SsdWeights
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.interface import StateLayer
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.workspace import TokenViews
from quire.models.spec import Mamba, Mamba2


class MambaLayer(StateLayer):
    """Mamba (the first): channels that decay each by itself, with time steps that depend on the token.

    A state is the last inputs of the convolution and S numbers a channel."""

    OUT = "ssm_out"

    def __init__(self, mixer: Mamba, context: LayerContext) -> None:
        self.mixer, self.channels = mixer, context.plan.share(mixer.channels, "Mamba channels")
        super().__init__(mixer, context, (mixer.conv - 1, self.channels), (mixer.state, self.channels))
        self.dt_b_c = (mixer.dt_rank, mixer.state, mixer.state)
        self.columns = (2 * self.channels, self.channels, sum(self.dt_b_c), mixer.dt_rank, self.channels)
        self.wide, self.narrow = sum(self.columns), self.channels
        if mixer.norm is not None and not mixer.norm_weights:
            for name, size in zip(("dt", "b", "c"), self.dt_b_c, strict=True):
                self.tensors[f"ssm_{name}_norm"] = torch.ones(size, device=context.device)

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Mamba) -> Iterator[Module]:
        inner, sizes = RowBlock(mixer.channels, mixer.channels), (mixer.dt_rank, mixer.state, mixer.state)
        yield builder.linear("ssm_in", (inner, inner), bias=mixer.bias, shard="rows")
        yield builder.table("ssm_conv", (inner,), mixer.conv, shard="rows", is_conv=True)
        if mixer.conv_bias:
            yield builder.table("ssm_conv_bias", (inner,), shard="rows")
        yield builder.linear("ssm_x", (RowBlock(sum(sizes), 1),), inner.rows, shard="columns", groups=inner.rows)
        if mixer.norm is not None and mixer.norm_weights:
            for name, size in zip(("dt", "b", "c"), sizes, strict=True):
                yield builder.table(f"ssm_{name}_norm", (RowBlock(size, 1),))
        yield builder.linear("ssm_dt", (inner,), mixer.dt_rank, bias=True, shard="rows")
        yield builder.table("ssm_a_log", (inner,), mixer.state, shard="rows")
        yield builder.table("ssm_d", (inner,), shard="rows")
        yield builder.linear(
            "ssm_out", (builder.hidden,), inner.rows, bias=mixer.bias, shard="columns", groups=inner.rows
        )

    def mix(self, x: HalfInput, step: StepInputs, views: TokenViews) -> torch.Tensor:
        metadata, method, tensors = self.metadata(step), self.context.linear_method, self.tensors
        conv_states, states = self.states
        projected_TC, mixed_TC, dt_b_c_TC, low_TR, dt_TC = views.side_by_side(*self.columns)
        y_TC = views.narrow(self.channels)
        x.multiply(self.linears["ssm_in"], projected_TC, views)
        raw_TC, gate_TC = projected_TC.chunk(2, dim=1)
        recurrent.causal_conv(
            raw_TC, tensors["ssm_conv"], self.tensors.get("ssm_conv_bias"), "silu", conv_states, metadata, mixed_TC
        )
        method.apply(mixed_TC, self.linears["ssm_x"], dt_b_c_TC)
        self.context.communicator.all_reduce(dt_b_c_TC)
        raw_TR, b_TS, c_TS = dt_b_c_TC.split(self.dt_b_c, dim=1)
        if self.mixer.norm is None:
            recurrent.scale_columns(raw_TR, None, low_TR)
        else:
            eps = self.mixer.norm.eps
            for name, part, out in (("dt", raw_TR, low_TR), ("b", b_TS, b_TS), ("c", c_TS, c_TS)):
                recurrent.gated_norm(part, None, tensors[f"ssm_{name}_norm"], eps, part.shape[1], True, out)
        method.apply(low_TR, self.linears["ssm_dt"], dt_TC)
        recurrent.selective_scan(
            mixed_TC, dt_TC, b_TS, c_TS, tensors["ssm_a_log"], tensors["ssm_d"], states, metadata, y_TC
        )
        recurrent.gate(y_TC, gate_TC, "silu", y_TC)
        return y_TC


class Mamba2Layer(StateLayer):
    """Mamba-2: heads with one decay each. A state is the last inputs of the convolution and a matrix [S, H] a head."""

    OUT = "ssm_out"

    def __init__(self, mixer: Mamba2, context: LayerContext) -> None:
        self.mixer = mixer
        context.plan.groups(mixer.norm_groups, "groups of Mamba-2's norm")  # refuses what ranks cannot share
        self.heads = context.plan.share(mixer.heads, "Mamba-2 heads")
        self.groups = context.plan.share(mixer.groups, "Mamba-2 groups")
        self.inner, shared = self.heads * mixer.head_dim, self.groups * mixer.state
        self.columns = (self.inner, self.inner, shared, shared, self.heads)
        self.mixed = self.inner + 2 * shared
        super().__init__(mixer, context, (mixer.conv - 1, self.mixed), (self.heads, mixer.state, mixer.head_dim))
        self.wide, self.narrow = sum(self.columns) + self.mixed, self.inner
        self.can_fuse = mixer.out_scale == 1.0
        self._scales_C: torch.Tensor | None = None
        if mixer.scales is not None:
            parts = [torch.full((count,), scale) for count, scale in zip(self.columns, mixer.scales, strict=True)]
            self._scales_C = torch.cat(parts).to(context.device)

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Mamba2) -> Iterator[Module]:
        inner = RowBlock(mixer.heads * mixer.head_dim, mixer.heads)
        shared, heads = RowBlock(mixer.groups * mixer.state, mixer.groups), RowBlock(mixer.heads, mixer.heads)
        mixed = (inner, shared, shared)
        yield builder.linear("ssm_in", (inner, *mixed, heads), bias=mixer.bias, shard="rows")
        yield builder.table("ssm_conv", mixed, mixer.conv, shard="rows", is_conv=True)
        if mixer.conv_bias:
            yield builder.table("ssm_conv_bias", mixed, shard="rows")
        for name in ("ssm_a_log", "ssm_d", "ssm_dt_bias"):
            yield builder.table(name, (heads,), shard="rows")
        if mixer.norm is not None:
            yield builder.table("ssm_norm", (inner,), shard="rows")
        yield builder.linear(
            "ssm_out", (builder.hidden,), inner.rows, bias=mixer.out_bias, shard="columns", groups=mixer.heads
        )

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        super().run(x, out, step, views)
        if self.mixer.out_scale != 1.0:
            ops.scale_and_cap(out.tensor(views), self.mixer.out_scale, 0.0)

    def mix(self, x: HalfInput, step: StepInputs, views: TokenViews) -> torch.Tensor:
        mixer, metadata = self.mixer, self.metadata(step)
        conv_states, head_states = self.states
        projected_TC, mixed_TC = views.side_by_side(sum(self.columns), self.mixed)
        y_TC = views.narrow(self.inner)
        x.multiply(self.linears["ssm_in"], projected_TC, views)
        if self._scales_C is not None:
            recurrent.scale_columns(projected_TC, self._scales_C, projected_TC)
        gate_TC, raw_TC, dt_TN = projected_TC.split((self.inner, self.mixed, self.heads), dim=1)
        tensors = self.tensors
        recurrent.causal_conv(
            raw_TC, tensors["ssm_conv"], self.tensors.get("ssm_conv_bias"), "silu", conv_states, metadata, mixed_TC
        )
        x_TC, b_TC, c_TC = mixed_TC.split((self.inner, *self.columns[2:4]), dim=1)
        by_head, by_group = (self.heads, mixer.head_dim), (self.groups, mixer.state)
        recurrent.ssd_scan(
            x_TC.unflatten(1, by_head),
            dt_TN,
            b_TC.unflatten(1, by_group),
            c_TC.unflatten(1, by_group),
            self._head_weights,
            head_states,
            metadata,
            y_TC.unflatten(1, by_head),
        )
        if mixer.norm is None:
            recurrent.gate(y_TC, gate_TC, "silu", y_TC)
        elif mixer.norm_groups % self.context.plan.size:
            self._norm_over_ranks(y_TC, gate_TC, mixer.norm.eps)
        else:
            group = mixer.heads * mixer.head_dim // mixer.norm_groups
            recurrent.gated_norm(y_TC, gate_TC, tensors["ssm_norm"], mixer.norm.eps, group, mixer.norm_first, y_TC)
        return y_TC

    def _norm_over_ranks(self, y_TC: torch.Tensor, gate_TC: torch.Tensor, eps: float) -> None:
        """The gated norm where a group's heads are on several ranks, each of which has a part of only one group."""
        mixer, plan = self.mixer, self.context.plan
        group, channels = plan.groups(mixer.norm_groups, "groups of a norm").start, mixer.heads * mixer.head_dim
        if not mixer.norm_first:
            recurrent.gate(y_TC, gate_TC, "silu", y_TC)
        sums_GT = torch.zeros(mixer.norm_groups, len(y_TC), device=y_TC.device)
        sums_GT[group] = y_TC.float().square().sum(-1)
        self.context.communicator.all_reduce(sums_GT)
        scale_T = torch.rsqrt(sums_GT[group] * (mixer.norm_groups / channels) + eps)
        y_TC.copy_(y_TC.float() * scale_T[:, None] * self.tensors["ssm_norm"])
        if mixer.norm_first:
            recurrent.gate(y_TC, gate_TC, "silu", y_TC)

    @functools.cached_property
    def _head_weights(self) -> SsdWeights:
        tensors = self.tensors
        return SsdWeights(tensors["ssm_a_log"], tensors["ssm_d"], tensors["ssm_dt_bias"], *self.mixer.dt_limits)
