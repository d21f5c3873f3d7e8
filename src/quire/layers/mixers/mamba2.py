"""Mamba-2 as a layer's mixer: one matrix in, a short convolution, the scan by heads, a gated norm, one matrix out.

Legend: T tokens, D hidden, N heads, H head size, G groups of heads, S state size, W width of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import ops, recurrent
from quire.kernels.types import SsdWeights
from quire.layers.interface import StepInputs
from quire.layers.mixers.interface import LayerContext
from quire.layers.mixers.state import Read, StateLayer
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews
from quire.models.spec import Mamba2


class Mamba2Layer(StateLayer):
    """Heads with one decay each; a state is the last inputs of the convolution and a matrix [S, H] a head."""

    NAMES = frozenset(
        ("ssm_in", "ssm_conv", "ssm_conv_bias", "ssm_a_log", "ssm_d", "ssm_dt_bias", "ssm_norm", "ssm_out")
    )

    OUT = "ssm_out"

    def __init__(self, mixer: Mamba2, context: LayerContext) -> None:
        self.mixer = mixer
        self.heads, self.groups = _local_heads(mixer, context.plan)
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
        self._weights: SsdWeights | None = None

    @staticmethod
    def modules(scope: LayerScope, mixer: Mamba2) -> Iterator[Module]:
        inner = Part(mixer.heads * mixer.head_dim, mixer.heads)
        shared, heads = Part(mixer.groups * mixer.state, mixer.groups), Part(mixer.heads, mixer.heads)
        mixed = (inner, shared, shared)
        yield scope.linear("ssm_in", (inner, *mixed, heads), bias=mixer.bias, shard="rows")
        yield scope.table("ssm_conv", mixed, mixer.conv, shard="rows", is_conv=True)
        if mixer.conv_bias:
            yield scope.table("ssm_conv_bias", mixed, shard="rows")
        for name in ("ssm_a_log", "ssm_d", "ssm_dt_bias"):
            yield scope.table(name, (heads,), shard="rows")
        if mixer.norm is not None:
            yield scope.table("ssm_norm", (inner,), shard="rows")
        yield scope.linear(
            "ssm_out", (scope.hidden,), inner.rows, bias=mixer.out_bias, shard="columns", groups=mixer.heads
        )

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        super().run(x_TD, out_TD, step, views)
        if self.mixer.out_scale != 1.0:
            ops.scale_and_cap(out_TD, self.mixer.out_scale, 0.0)

    def mix(self, read: Read, step: StepInputs, views: TokenViews) -> torch.Tensor:
        mixer, metadata = self.mixer, self.metadata(step)
        conv_states, head_states = self.states
        projected_TC, mixed_TC = self.room(views, sum(self.columns), self.mixed)
        y_TC = views.narrow(self.inner)
        read("ssm_in", projected_TC)
        if self._scales_C is not None:
            recurrent.scale_columns(projected_TC, self._scales_C, projected_TC)
        gate_TC, raw_TC, dt_TN = projected_TC.split((self.inner, self.mixed, self.heads), dim=1)
        tensors = self.tensors
        recurrent.causal_conv(
            raw_TC, tensors["ssm_conv"], self.constant("ssm_conv_bias"), "silu", conv_states, metadata, mixed_TC
        )
        x_TC, b_TC, c_TC = mixed_TC.split((self.inner, *self.columns[2:4]), dim=1)
        by_head, by_group = (self.heads, mixer.head_dim), (self.groups, mixer.state)
        recurrent.ssd_scan(
            x_TC.unflatten(1, by_head), dt_TN, b_TC.unflatten(1, by_group), c_TC.unflatten(1, by_group),
            self._head_weights(), head_states, metadata, y_TC.unflatten(1, by_head),
        )  # fmt: skip
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

    def _head_weights(self) -> SsdWeights:
        if self._weights is None:
            tensors, limits = self.tensors, self.mixer.dt_limits
            self._weights = SsdWeights(tensors["ssm_a_log"], tensors["ssm_d"], tensors["ssm_dt_bias"], *limits)
        return self._weights


def _local_heads(mixer: Mamba2, plan: ParallelPlan) -> tuple[int, int]:
    """Heads and groups of this rank."""
    plan.groups(mixer.norm_groups, "groups of Mamba-2's norm")
    heads, groups = plan.groups(mixer.heads, "Mamba-2 heads"), plan.groups(mixer.groups, "Mamba-2 groups")
    return heads.stop - heads.start, groups.stop - groups.start
