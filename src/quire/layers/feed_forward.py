"""The half of a layer that looks at one token at a time: dense, gated, or a mixture of experts.

Legend: T tokens, D hidden, I intermediate.
"""

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch

from quire.kernels import ops
from quire.kernels.norm import XIELU, set_alpha
from quire.layers.assembly import Weight
from quire.layers.dense import DenseFeedForward
from quire.layers.half import HalfInput, HalfOutput, NormedInput
from quire.layers.held_weights import HeldWeights
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.modules import Module, ModuleBuilder, RowBlock, SourceLayout
from quire.layers.moe import Mixture, NormedMixture
from quire.layers.workspace import TokenViews, Workspace
from quire.models.spec import MLP, FeedForward, GatedMLP, MoE


class FeedForwardLayer(HeldWeights):
    """One feed-forward on this rank.

    Args:
        layer: what stands before the names of its modules.

    Attributes:
        dense: its matrices but for the last one; of a mixture, those that every token takes.
        mixture: the experts, if it has some.
        wide, narrow: columns a token that it needs of the workspace's wide and narrow buffers.
        is_whole: its output is already the sum over ranks.
        is_late: its experts' output waits in `TokenViews.beside_TD` for the next layer.
    """

    def __init__(self, mlp: FeedForward, context: LayerContext, layer: str = "") -> None:
        super().__init__()
        self.mlp, self.context, self._is_first, self._layer = mlp, context, context.plan.rank == 0, layer
        self.mixture: Mixture | None = None
        self.is_late = isinstance(mlp, MoE) and mlp.late
        self.is_whole = isinstance(mlp, MoE) and mlp.own_norms is not None
        dense = mlp.shared if isinstance(mlp, MoE) else mlp
        self.dense = None if dense is None else DenseFeedForward(dense, context)
        self.wide, self.narrow = (0, 0) if self.dense is None else (self.dense.wide, self.dense.width)
        if isinstance(mlp, MoE) and mlp.latent:
            self.wide = max(self.wide, mlp.latent, context.hidden)
            self.narrow = max(self.narrow, mlp.latent)

    @property
    def can_fuse(self) -> bool:
        """Whether its input may be a `NormedInput` and its output a `ResidualOutput`."""
        mlp = self.mlp
        if isinstance(mlp, MoE):
            is_plain = not (mlp.latent or mlp.late or mlp.out_bias or mlp.routing.cap or mlp.learned_scale)
            return is_plain and ops.is_native("norm_moe")
        if not isinstance(mlp, GatedMLP):
            return True
        return (mlp.scale, mlp.out_scale, mlp.limit) == (1.0, 1.0, 0.0) and not mlp.learned_scale

    @property
    def can_replay(self) -> bool:
        """Whether a step with it can be recorded, or captured as a graph: limits of their own are plain PyTorch."""
        mlp = self.mlp.shared if isinstance(self.mlp, MoE) else self.mlp
        is_listed = isinstance(self.mlp, MoE) and self.mlp.clamp is not None and self.mlp.clamp.gate_limit is not None
        is_limited = isinstance(mlp, GatedMLP) and mlp.gate_limit is not None
        is_exchanged = isinstance(self.mlp, MoE) and self.context.exchange is not None
        return not (is_listed or is_limited or is_exchanged)

    @staticmethod
    def modules(builder: ModuleBuilder, mlp: FeedForward) -> Iterator[Module]:
        """Its matrices, in the order of computation."""
        if isinstance(mlp, MoE):
            yield from _mixture_modules(builder, mlp)
            return
        wide = RowBlock(mlp.intermediate, mlp.intermediate)
        if isinstance(mlp, GatedMLP):
            layouts = (SourceLayout((1, 0)),) if mlp.up_first else ()
            yield builder.linear("gate_up", (wide, wide), bias=mlp.bias, shard="rows", layouts=layouts)
        else:
            yield builder.linear("up", (wide,), bias=mlp.bias, shard="rows")
        if mlp.act == XIELU:
            yield builder.vector("act_positive", RowBlock(1, 1))
            yield builder.vector("act_negative", RowBlock(1, 1))
        if isinstance(mlp, GatedMLP) and mlp.learned_scale:
            yield builder.vector("mlp_scale", RowBlock(1, 1))
        down_bias = mlp.bias or (isinstance(mlp, GatedMLP) and mlp.down_bias)
        yield builder.linear(
            "down", (builder.hidden,), mlp.intermediate, bias=down_bias, shard="columns", groups=mlp.intermediate
        )

    def reserve(self, workspace: Workspace) -> None:
        """Make room for experts; mixtures of equal shape share it."""
        mlp, plan = self.mlp, self.context.plan
        if isinstance(mlp, MoE):
            share = mlp.intermediate // (1 if plan.expert_parallel else plan.size)
            kind = Mixture if mlp.own_norms is None else NormedMixture
            routing = mlp.routing
            if plan.redundant is not None:
                routing = dataclasses.replace(routing, num_experts=plan.places(mlp.num_experts))
            room = workspace.experts(routing, share, mlp.latent)
            self.mixture = kind(mlp, self.context, self.dense, room, self._layer)

    def set_weight(self, name: str, weight: Weight) -> None:
        if self.mixture is not None:
            self.mixture.set_weight(name, weight)
        elif name in ("act_positive", "act_negative"):
            alphas = cast(DenseFeedForward, self.dense).alphas
            set_alpha(cast(torch.Tensor, alphas), name == "act_positive", cast(torch.Tensor, weight))
        else:
            super().set_weight(name, weight)

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        """out = this rank's part of the feed-forward of x; `out` may be where x is unless there are experts."""
        fused = x if self._is_first and isinstance(x, NormedInput) else None
        if self.mixture is not None:
            self.mixture.token_ids = step.input_ids
            if fused is not None:
                self.mixture.run_normed(views.residual_TD, fused.norm_D, fused.eps, step.attention[0].shape, views)
            else:
                self.mixture.run(x.tensor(views), out.tensor(views), step.attention[0].shape, views)
            return
        dense, linears = self.dense, self.linears
        assert dense is not None, "only a mixture may lack a dense feed-forward"
        if not isinstance(self.mlp, GatedMLP):
            out.multiply(dense.activate(x, linears["up"], views), linears["down"], views)
        elif fused is not None:
            self.context.linear_method.apply_gated_mlp(
                views.residual_TD,
                fused.norm_D,
                fused.eps,
                linears["gate_up"],
                dense.activation,
                linears["down"],
                views.narrow(dense.width),
                views.normed_TD,
                views.wide(dense.wide),
                views.delta_TD,
            )
        else:
            out.multiply(dense.activate(x, linears["gate_up"], views), linears["down"], views)
            if self.mlp.out_scale != 1.0:
                ops.scale_and_cap(out.tensor(views), self.mlp.out_scale, 0.0)
            if "mlp_scale" in self.tensors:
                out.tensor(views).mul_(self.tensors["mlp_scale"])


def _mixture_modules(builder: ModuleBuilder, mlp: MoE) -> Iterator[Module]:
    count, wide = mlp.num_experts, RowBlock(mlp.intermediate, mlp.intermediate)
    chosen_from = RowBlock(mlp.routing.num_experts, 1)
    yield builder.linear("router", (chosen_from,), bias=mlp.router_bias, plain=True)
    if mlp.bias_correction:
        yield builder.vector("router_bias", RowBlock(mlp.routing.num_experts - mlp.always, 1))
    if mlp.learned_scale:
        yield builder.vector("experts_scale", RowBlock(1, 1))
    if mlp.by_token:
        yield builder.table("token_experts", (RowBlock(builder.spec.vocab, 1),), mlp.routing.top_k, is_whole=True)
    if mlp.own_norms is not None:
        yield builder.vector("router_scale", builder.hidden)
        for name in ("shared_after", "experts_before", "experts_after"):
            yield builder.norm(name, mlp.own_norms, builder.hidden.rows)
    if mlp.out_bias:
        yield builder.vector("experts_bias", builder.hidden)
    if mlp.expert_scales:
        yield builder.vector("expert_scales", RowBlock(count, 1))
    halves, outside = (wide, wide) if mlp.is_gated else (wide,), builder.hidden
    if mlp.latent:
        outside = RowBlock(mlp.latent, 1)
        yield builder.linear("experts_in", (outside,), bias=mlp.latent_bias)
        yield builder.linear("experts_out", (builder.hidden,), mlp.latent, bias=mlp.latent_bias)
    inside = mlp.intermediate
    for name, many in (("experts", count), ("always", mlp.always)):
        if many:
            yield builder.experts(f"{name}_gate_up", many, halves, outside.rows, shard="rows")
            yield builder.experts(f"{name}_down", many, (outside,), inside, shard="columns", groups=inside)
    if mlp.experts_bias:
        yield builder.experts("experts_gate_up_bias", count, halves, 0, shard="rows")
        yield builder.experts("experts_down_bias", count, (outside,), 0, shard="none")
    if mlp.shared is not None:
        yield from _shared_modules(builder, mlp.shared)
        if mlp.shared_gate:
            yield builder.linear("shared_gate", (RowBlock(1, 1),), plain=True)


def _shared_modules(builder: ModuleBuilder, mlp: GatedMLP | MLP) -> Iterator[Module]:
    wide = RowBlock(mlp.intermediate, mlp.intermediate)
    halves = (wide, wide) if isinstance(mlp, GatedMLP) else (wide,)
    yield builder.linear("shared_gate_up", halves, bias=mlp.bias, shard="rows")
    yield builder.linear("shared_down", (builder.hidden,), wide.rows, bias=mlp.bias, shard="columns", groups=wide.rows)
