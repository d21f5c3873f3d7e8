"""One layer's mixture of experts on one rank: its weights, and the order of its operations.

Knows which operation reads what. How tokens choose and how experts are computed are kernels' business; shared experts are
ordinary matrices and belong to the `LinearMethod`; routers and gates stay in the model's own number type.
Legend: T tokens, E experts, K experts a token, D hidden, I intermediate, S tokens of one expert.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import torch

from quire.kernels import experts, ops
from quire.kernels.types import ExpertScratch, LinearWeight
from quire.layers.activation import kernel_activation
from quire.layers.assembly import NormWeight, Weight
from quire.layers.dense import DenseFeedForward
from quire.layers.expert_balance import ExpertPlaces, evenness
from quire.layers.expert_set import ExpertSet
from quire.layers.half import HalfInput
from quire.layers.held_weights import HeldWeights
from quire.layers.interface import LayerContext
from quire.layers.workspace import TokenViews
from quire.logger import init_logger
from quire.models.residual import RMSNorm
from quire.models.spec import GatedMLP, MoE

logger = init_logger(__name__)

ALWAYS = 1e9
"""A bias on the choice of an expert that every token has."""


class Mixture(HeldWeights):
    """Routed experts, and the feed-forward that every token takes besides, if there is one.

    Args:
        shared: what every token takes, without its last matrix.
        scratch: buffers that all mixtures of a model use in turn.
        layer: what stands before the names of its modules.
    """

    def __init__(
        self,
        mlp: MoE,
        context: LayerContext,
        shared: DenseFeedForward | None,
        scratch: ExpertScratch,
        layer: str,
    ) -> None:
        super().__init__()
        self.mlp, self.routing, self.activation = mlp, mlp.routing, kernel_activation(mlp.act)
        self.token_ids = torch.empty(0)
        """Of the step, for mixtures that choose by them."""
        self._context, self._method, self._shared, self._scratch = context, context.linear_method, shared, scratch
        self._experts = ExpertSet(mlp, context, context.plan.experts(mlp.num_experts).start, "experts", layer)
        self._always: ExpertSet | None = None
        if mlp.always:
            first = mlp.num_experts + context.plan.experts(mlp.always).start
            self._always = ExpertSet(mlp, context, first, "always", layer)
        self.exchange = context.exchange if context.plan.expert_parallel else None
        self._has_exchanged = False
        owners = context.plan.owners(mlp.num_experts) + (context.plan.owners(mlp.always) if mlp.always else [])
        owners += [context.plan.num_owners] * (mlp.routing.num_experts - len(owners))  # experts without matrices
        self._owners_E = torch.tensor(owners, device=context.device)
        self.places: ExpertPlaces | None = None
        if context.plan.redundant is not None:
            ranks = context.communicator if self.exchange is None else self.exchange.communicator
            self.places = ExpertPlaces(mlp.num_experts, context.plan, ranks, context.device)
            self._owners_E = self.places.owners_E

    def set_weight(self, name: str, weight: Weight) -> None:
        is_first = self._context.plan.rank == 0
        for each in (self._experts, self._always):
            if each is not None and each.takes(name):
                each.set_weight(name, weight)
                return
        if name == "experts_bias" and not is_first:
            weight = torch.zeros_like(cast(torch.Tensor, weight))  # summed over ranks: one adds it
        if name == "experts_out" and not is_first:
            weight = dataclasses.replace(cast(LinearWeight, weight), bias=None)
        if name == "router_bias" and self.mlp.always:
            weight = torch.nn.functional.pad(cast(torch.Tensor, weight), (0, self.mlp.always), value=ALWAYS)
        super().set_weight(name, weight)

    def post_load(self) -> None:
        """All weights are there: experts that are balanced take all of their rank's places."""
        if self.places is not None and self._experts.make_room(self.places.room, self.places.first):
            self.places.as_loaded()
            self.places.deal([1] * self.mlp.num_experts, self._experts.tensors())

    def balance(self, loads: Sequence[int], name: str) -> None:
        """Deal experts anew by loads; every rank does, between two steps. `name`: for the log, if any."""
        assert self.places is not None
        before = self.places.now
        self.places.deal(loads, self._experts.tensors())
        if name:
            places = [evenness(loads, each, self._context.plan.num_owners) for each in (before, self.places.now)]
            logger.info(
                "%s: the mean load of ranks by the largest was %.2f, and is %.2f with experts dealt anew", name, *places
            )

    def fixed(self, name: str) -> str:
        """Why adapters cannot change some of its experts' matrices; empty: they can."""
        return next((each.fixed for each in (self._experts, self._always) if each is not None and each.takes(name)), "")

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, num_tokens: torch.Tensor, views: TokenViews) -> None:
        """out = the mixture of x, this rank's part of it. `views` has room for the shared feed-forward."""
        ids_TK, weights_TK = self._choose(x_TD, num_tokens)
        read, given = x_TD, views.beside_TD if self.mlp.late else out_TD
        if self.mlp.latent:
            read, given = views.narrow(self.mlp.latent), views.wide(self.mlp.latent)
            self._method.apply(x_TD, self.linears["experts_in"], read)
        self._run_experts(read, ids_TK, weights_TK, num_tokens, given)
        if self.mlp.latent:
            self._method.apply(given, self.linears["experts_out"], out_TD)
        if self.mlp.zero_experts and self._context.plan.rank == 0:  # experts without matrices give what they read
            experts.add_chosen_inputs(x_TD, ids_TK, weights_TK, self.mlp.num_experts, given)
        if "experts_bias" in self.tensors:
            given.add_(self.tensors["experts_bias"])
        if self._shared is None:
            return
        activated_TI = self._activate_shared(self._shared, x_TD, views)
        if self.mlp.late:
            self._method.apply(activated_TI, self.linears["shared_down"], out_TD)
        else:
            shared_TD = views.wide(x_TD.shape[1]) if self.mlp.latent else self._scratch.out_PD[: len(x_TD)]
            self._method.apply(activated_TI, self.linears["shared_down"], shared_TD)
            ops.add(shared_TD, out_TD)

    def _choose(self, x_TD: torch.Tensor, num_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts and their weights, both [T, K]."""
        count, scratch = x_TD.shape[0], self._scratch
        ids_TK, weights_TK, experts_E = scratch.ids_TK[:count], scratch.weights_TK[:count], self.routing.num_experts
        logits_TE = scratch.logits_TE.view(-1)[: count * experts_E].view(count, experts_E)  # it may have room for more
        self._method.apply(x_TD, self.linears["router"], logits_TE)
        if self.routing.cap > 0:
            ops.scale_and_cap(logits_TE, 1.0, self.routing.cap)
        bias_E, table_VK = self.tensors.get("router_bias"), self.tensors.get("token_experts")
        if table_VK is not None or self.routing.scoring == "sqrtsoftplus":
            chosen_TK = None if table_VK is None else table_VK[self.token_ids[:count].long()].long()
            experts.route_plainly(logits_TE, self.routing, bias_E, chosen_TK, ids_TK, weights_TK)
        else:
            ops.moe_route(logits_TE, self.routing, num_tokens, ids_TK, weights_TK, bias_E)
        if "experts_scale" in self.tensors:
            weights_TK.mul_(self.tensors["experts_scale"])
        if "expert_scales" in self.tensors:
            experts.scale_choices(weights_TK, ids_TK, self.tensors["expert_scales"])
        return ids_TK, weights_TK

    def _run_experts(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        num_tokens: torch.Tensor,
        out_TD: torch.Tensor,
    ) -> None:
        if self.places is not None:
            ids_TK = self.places.find(ids_TK, num_tokens)
        if self.exchange is None:
            self._run_own(x_TD, ids_TK, weights_TK, num_tokens, out_TD)
            return
        mine = self._context.plan.tokens(len(x_TD))
        owned, run = self._owners_E, self._run_received
        if mine != slice(0, len(x_TD)):
            out_TD.zero_()
        self.exchange.run(x_TD[mine], ids_TK[mine], weights_TK[mine], owned, run, out_TD[mine])
        self._has_exchanged = not self.exchange.communicator.is_silent

    def finish_step(self) -> None:
        """Compute what other ranks want of this one's experts, unless the step that ends here has."""
        if not self._has_exchanged:
            scratch, width = self._scratch, self.mlp.latent or self._context.hidden
            nothing = scratch.out_PD.new_empty(0, width)
            self._run_experts(nothing, scratch.ids_TK[:0], scratch.weights_TK[:0], scratch.ids_TK.new_zeros(1), nothing)
        self._has_exchanged = False

    def _run_received(self, x_RD: torch.Tensor, ids_RK: torch.Tensor, weights_RK: torch.Tensor) -> torch.Tensor:
        out_RD, room = torch.empty_like(x_RD), len(self._scratch.ids_TK)
        for start in range(0, len(x_RD), room):
            some = slice(start, start + room)
            count = _count(len(x_RD[some]), x_RD.device)
            self._run_own(x_RD[some], ids_RK[some], weights_RK[some], count, out_RD[some])
        return out_RD

    def _run_own(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        num_tokens: torch.Tensor,
        out_TD: torch.Tensor,
    ) -> None:
        """out = what this rank's experts give."""
        choice = (ids_TK, weights_TK)
        self._experts.run(x_TD, choice, self.activation, num_tokens, out_TD, self._scratch)
        if self._always is not None:
            given_TD = torch.empty_like(out_TD)
            self._always.run(x_TD, choice, self.activation, num_tokens, given_TD, self._scratch)
            ops.add(given_TD, out_TD)

    def run_normed(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, num_tokens: torch.Tensor, views: TokenViews
    ) -> None:
        """x += the mixture of rms_norm(x), on a platform that has kernels for all of it. `views` gives room."""
        is_apart = self.exchange is not None or self.places is not None
        if is_apart or self._experts.is_adapted or self._method.adapts(self.linears["router"].name):
            ops.rms_norm(x_TD, norm_D, eps, views.normed_TD)
            self.run(views.normed_TD, views.delta_TD, num_tokens, views)
            ops.add(views.delta_TD, x_TD)
            return
        activated_TI = None
        if self._shared is not None:
            ops.rms_norm(x_TD, norm_D, eps, views.normed_TD)
            activated_TI = self._activate_shared(self._shared, views.normed_TD, views)
        router, bias_E, weights = self.linears["router"], self.tensors.get("router_bias"), self._experts.weights
        room = (num_tokens, views.normed_TD, self._scratch)
        ops.norm_moe(x_TD, norm_D, eps, router, self.routing, weights, self.activation, *room, bias_E)
        if activated_TI is not None:
            self._method.apply_add(activated_TI, self.linears["shared_down"], x_TD, views.delta_TD)

    def _activate_shared(self, shared: DenseFeedForward, x_TD: torch.Tensor, views: TokenViews) -> torch.Tensor:
        """What the last matrix of the shared feed-forward reads."""
        activated_TI = shared.activate(
            HalfInput(self._method, lambda views: x_TD), self.linears["shared_gate_up"], views
        )
        if "shared_gate" in self.linears:
            gate_T1 = self._scratch.logits_TE.view(-1)[: x_TD.shape[0]].view(-1, 1)
            self._method.apply(x_TD, self.linears["shared_gate"], gate_T1)
            ops.sigmoid_gate(activated_TI, gate_T1)
        if isinstance(shared.mlp, GatedMLP) and shared.mlp.out_scale != 1.0:
            ops.scale_and_cap(activated_TI, shared.mlp.out_scale, 0.0)
        return activated_TI


@functools.lru_cache
def _count(number: int, device: torch.device) -> torch.Tensor:
    """A number of tokens on the device, for all layers of a step."""
    return torch.full((1,), number, device=device)


class NormedMixture(Mixture):
    """A mixture whose router, experts and shared feed-forward have norms of their own (Gemma 4):
    after_shared(shared(x)) + after_experts(experts(before_experts(r))), with r the residual and x its norm before the half.

    Sums over ranks by itself, since norms follow what is summed."""

    def set_weight(self, name: str, weight: Weight) -> None:
        if isinstance(weight, NormWeight):
            weight = weight.weight
        elif name == "router_scale":  # the router's input is divided by sqrt(D) besides
            tensor = cast(torch.Tensor, weight)
            weight = tensor * len(tensor) ** -0.5
        super().set_weight(name, weight)

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, num_tokens: torch.Tensor, views: TokenViews) -> None:
        """`x` is a buffer that may be overwritten."""
        norms, eps, communicator = self.tensors, cast(RMSNorm, self.mlp.own_norms).eps, self._context.communicator
        residual_TD, beside_TD = views.residual_TD, views.beside_TD
        activated_TI = self._activate_shared(cast(DenseFeedForward, self._shared), x_TD, views)
        self._method.apply(activated_TI, self.linears["shared_down"], out_TD)
        communicator.all_reduce(out_TD)
        ops.rms_norm(out_TD, norms["shared_after"], eps, out_TD)
        ops.rms_norm(residual_TD, norms["router_scale"], eps, x_TD)
        choice = self._choose(x_TD, num_tokens)
        ops.rms_norm(residual_TD, norms["experts_before"], eps, x_TD)
        self._run_experts(x_TD, *choice, num_tokens, beside_TD)
        communicator.all_reduce(beside_TD)
        ops.rms_norm(beside_TD, norms["experts_after"], eps, beside_TD)
        ops.add(beside_TD, out_TD)
