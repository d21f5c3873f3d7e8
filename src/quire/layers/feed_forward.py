"""The half of a layer that looks at one token at a time: dense, gated, or a mixture of experts.

Legend: T tokens, D hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch

from quire.kernels import ops
from quire.kernels.norm import XIELU, set_alpha, xielu
from quire.kernels.types import LinearWeight
from quire.layers.activation import kernel_activation
from quire.layers.interface import StepInputs
from quire.layers.mixers.interface import LayerContext
from quire.layers.modules import Deal, LayerScope, Module, Part
from quire.layers.moe import Mixture, Shared, limit_halves
from quire.layers.normed_moe import NormedMixture
from quire.layers.workspace import TokenViews, Workspace
from quire.models.spec import FeedForward, GatedMLP, MoE

if TYPE_CHECKING:
    from quire.layers.assembly import Weight


class FeedForwardLayer:
    """One feed-forward on this rank.

    Attributes:
        wide, narrow: columns a token that it needs of the workspace's wide and narrow buffers.
        mixture: the experts, if it has some.
        is_whole: its output is already the sum over ranks.
        is_late: its experts' output waits in `TokenViews.beside_TD` for the next layer.
    """

    NAMES = frozenset(("gate_up", "up", "act_positive", "act_negative", "down", *NormedMixture.WEIGHTS))

    def __init__(self, mlp: FeedForward, context: LayerContext) -> None:
        self.mlp, self.context = mlp, context
        self.activation = kernel_activation(mlp.act)
        self.linears: dict[str, LinearWeight] = {}
        self.mixture: Mixture | None = None
        self.is_late = isinstance(mlp, MoE) and mlp.late
        self.is_whole = isinstance(mlp, MoE) and mlp.own_norms is not None
        self._alphas = torch.zeros(2, device=context.device) if mlp.act == XIELU else None
        dense = mlp.shared if isinstance(mlp, MoE) else mlp
        self.width = 0 if dense is None else dense.intermediate // context.plan.size
        self.wide = 2 * self.width if isinstance(dense, GatedMLP) else 0
        self.narrow = self.width
        if isinstance(mlp, MoE) and mlp.latent:
            self.wide = max(self.wide, mlp.latent, context.hidden)
            self.narrow = max(self.narrow, mlp.latent)

    @staticmethod
    def modules(scope: LayerScope, mlp: FeedForward) -> Iterator[Module]:
        """Its matrices, in the order of computation."""
        if isinstance(mlp, MoE):
            yield from _mixture_modules(scope, mlp)
            return
        wide = Part(mlp.intermediate, mlp.intermediate)
        if isinstance(mlp, GatedMLP):
            deals = (Deal((1, 0)),) if mlp.up_first else ()
            yield scope.linear("gate_up", (wide, wide), bias=mlp.bias, shard="rows", deals=deals)
        else:
            yield scope.linear("up", (wide,), bias=mlp.bias, shard="rows")
        if mlp.act == XIELU:
            yield scope.vector("act_positive", Part(1, 1))
            yield scope.vector("act_negative", Part(1, 1))
        down_bias = mlp.bias or (isinstance(mlp, GatedMLP) and mlp.down_bias)
        yield scope.linear(
            "down", (scope.hidden,), mlp.intermediate, bias=down_bias, shard="columns", groups=mlp.intermediate
        )

    def reserve(self, workspace: Workspace) -> None:
        """Make room for experts; mixtures of equal shape share it."""
        mlp = self.mlp
        if isinstance(mlp, MoE):
            plan = self.context.plan
            share = mlp.intermediate // (1 if plan.expert_parallel else plan.size)
            scratch = workspace.experts(mlp.routing, share, mlp.latent)
            first = plan.experts(mlp.num_experts).start
            options = {"clamp": mlp.clamp, "scales_input": mlp.scales_input, "first": first}
            shared = None
            if mlp.shared is not None:
                factors = (getattr(mlp.shared, "out_scale", 1.0), getattr(mlp.shared, "limit", 0.0))
                shared = Shared(self.width, isinstance(mlp.shared, GatedMLP), *factors)
            kind = Mixture if mlp.own_norms is None else NormedMixture
            self.mixture = kind(
                mlp.routing, options, mlp.experts_bias, self.activation, shared, self.context.linear_method, scratch,
                mlp.latent, mlp.num_experts if mlp.zero_experts and plan.rank == 0 else None, mlp.late,
            )  # fmt: skip
            if mlp.own_norms is not None and isinstance(self.mixture, NormedMixture):
                self.mixture.set_norms(mlp.own_norms.eps, self.context.communicator)

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        plan = self.context.plan
        adds_once = name == "experts_bias" or (name == "experts_down_bias" and not plan.expert_parallel)
        if adds_once and plan.rank > 0:  # summed over ranks: one adds it
            weight = torch.zeros_like(cast(torch.Tensor, weight))
        if name == "experts_out" and plan.rank > 0:
            weight = dataclasses.replace(cast(LinearWeight, weight), bias=None)
        if self.mixture is not None:
            if isinstance(weight, list):
                is_gated = name == "experts_gate_up" and cast(MoE, self.mlp).is_gated
                weight = self.context.linear_method.ready_experts(weight, is_gated=is_gated)
            self.mixture.set_weight(name, cast("LinearWeight | torch.Tensor | list[LinearWeight]", weight))
        elif self._alphas is not None and isinstance(weight, torch.Tensor):
            set_alpha(self._alphas, name == "act_positive", weight)
        else:
            self.linears[name] = cast(LinearWeight, weight)

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> None:
        """out = this rank's part of the feed-forward of x; `out` may be x unless there are experts."""
        if self.mixture is not None:
            self.mixture.token_ids = step.input_ids
            self.mixture.run(x_TD, out_TD, step.attention[0].shape, views)
            return
        method, activated_TI = self.context.linear_method, views.narrow(self.width)
        if isinstance(self.mlp, GatedMLP):
            gate_up_T2I = views.wide(2 * self.width)
            method.apply(x_TD, self.linears["gate_up"], gate_up_T2I)
            if self.mlp.scale != 1.0:
                ops.scale_and_cap(gate_up_T2I, self.mlp.scale, 0.0)
            limit_halves(gate_up_T2I, self.mlp.limit)
            ops.gated_activation(gate_up_T2I, self.activation, activated_TI)
        else:
            method.apply(x_TD, self.linears["up"], activated_TI)
            self._activate(activated_TI)
        method.apply(activated_TI, self.linears["down"], out_TD)
        if isinstance(self.mlp, GatedMLP) and self.mlp.out_scale != 1.0:
            ops.scale_and_cap(out_TD, self.mlp.out_scale, 0.0)

    def _activate(self, x_TI: torch.Tensor) -> None:
        if self._alphas is None:
            ops.activation(x_TI, self.activation)
        else:
            xielu(x_TI, self._alphas)

    def run_normed(self, norm_D: torch.Tensor, eps: float, step: StepInputs, views: TokenViews) -> None:
        """residual += the feed-forward of rms_norm(residual), in fewer passes. Over several ranks rank 0 adds its part to the
        residual and the others put theirs in its place: the caller sums."""
        residual_TD, normed_TD, is_first = views.residual_TD, views.normed_TD, self.context.plan.rank == 0
        method, linears, activated_TI = self.context.linear_method, self.linears, views.narrow(self.width)
        if self.mixture is not None:
            if is_first:
                self.mixture.run_normed(residual_TD, norm_D, eps, step.attention[0].shape, views)
            else:
                ops.rms_norm(residual_TD, norm_D, eps, normed_TD)
                self.mixture.run(normed_TD, residual_TD, step.attention[0].shape, views)
            return
        if isinstance(self.mlp, GatedMLP) and is_first:
            method.apply_gated_mlp(
                residual_TD, norm_D, eps, linears["gate_up"], self.activation, linears["down"], activated_TI, normed_TD,
                views.wide(2 * self.width), views.delta_TD,
            )  # fmt: skip
            return
        if isinstance(self.mlp, GatedMLP):
            method.apply_normed_gated(
                residual_TD, norm_D, eps, linears["gate_up"], self.activation, activated_TI, normed_TD,
                views.wide(2 * self.width),
            )  # fmt: skip
        else:
            method.apply_normed(residual_TD, norm_D, eps, linears["up"], activated_TI, normed_TD)
            self._activate(activated_TI)
        if is_first:
            method.apply_add(activated_TI, linears["down"], residual_TD, views.delta_TD)
        else:
            method.apply(activated_TI, linears["down"], residual_TD)


def _mixture_modules(scope: LayerScope, mlp: MoE) -> Iterator[Module]:
    count, wide = mlp.num_experts, Part(mlp.intermediate, mlp.intermediate)
    chosen_from = Part(mlp.routing.num_experts, 1)
    yield scope.linear("router", (chosen_from,), bias=mlp.router_bias, plain=True)
    if mlp.bias_correction:
        yield scope.vector("router_bias", chosen_from)
    if mlp.by_token:
        yield scope.table("token_experts", (Part(scope.spec.vocab, 1),), mlp.routing.top_k, is_whole=True)
    if mlp.own_norms is not None:
        yield scope.vector("router_scale", scope.hidden)
        for name in ("shared_after", "experts_before", "experts_after"):
            yield scope.norm(name, mlp.own_norms, scope.hidden.rows)
    if mlp.out_bias:
        yield scope.vector("experts_bias", scope.hidden)
    if mlp.expert_scales:
        yield scope.vector("expert_scales", Part(count, 1))
    halves, outside = (wide, wide) if mlp.is_gated else (wide,), scope.hidden
    if mlp.latent:
        outside = Part(mlp.latent, 1)
        yield scope.linear("experts_in", (outside,), bias=mlp.latent_bias)
        yield scope.linear("experts_out", (scope.hidden,), mlp.latent, bias=mlp.latent_bias)
    yield scope.experts("experts_gate_up", count, halves, outside.rows, shard="rows")
    yield scope.experts("experts_down", count, (outside,), mlp.intermediate, shard="columns", groups=mlp.intermediate)
    if mlp.experts_bias:
        yield scope.experts("experts_gate_up_bias", count, halves, 0, shard="rows")
        yield scope.experts("experts_down_bias", count, (outside,), 0, shard="none")
    if mlp.shared is not None:
        shared = Part(mlp.shared.intermediate, mlp.shared.intermediate)
        bias = mlp.shared.bias
        halves = (shared, shared) if isinstance(mlp.shared, GatedMLP) else (shared,)
        yield scope.linear("shared_gate_up", halves, bias=bias, shard="rows")
        yield scope.linear("shared_down", (scope.hidden,), shared.rows, bias=bias, shard="columns", groups=shared.rows)
        if mlp.shared_gate:
            yield scope.linear("shared_gate", (Part(1, 1),), plain=True)
