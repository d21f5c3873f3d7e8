"""One layer's mixture of experts on one rank: its weights, and the order of its operations.

Knows which operation reads what. How tokens choose and how experts are computed are kernels' business; shared experts are
ordinary matrices and belong to the `LinearMethod`; routers and gates stay in the model's own number type.
Legend: T tokens, E experts, K experts a token, D hidden, I intermediate, S tokens of one expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from quire.kernels import experts, ops
from quire.kernels.types import ClampedSwiglu, ExpertCodes, ExpertScratch, ExpertWeights, LinearWeight
from quire.layers.activation import kernel_activation
from quire.layers.assembly import NormWeight, Weight
from quire.layers.dense import DenseFeedForward
from quire.layers.half import HalfInput
from quire.layers.interface import LayerContext
from quire.layers.linear import Products
from quire.layers.workspace import TokenViews
from quire.models.residual import RMSNorm
from quire.models.spec import GatedMLP, MoE


def by_expert(ids_TK: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert that some token chose, the tokens [S], and which of their choices it is."""
    pairs, top_k = ids_TK.flatten().sort(stable=True), ids_TK.shape[1]
    hit, counts = pairs.values.unique_consecutive(return_counts=True)
    for expert, chosen in zip(hit.tolist(), pairs.indices.split(counts.tolist()), strict=True):
        yield expert, chosen // top_k, chosen % top_k


@dataclasses.dataclass(frozen=True)
class ListedExperts:
    """Experts as weights of their own, in any format: where the host may look at what a router chose.

    All but their products is plain PyTorch, so steps of such mixtures run eagerly. Fields that are not
    explained are those of `ExpertWeights`.

    Attributes:
        products: of such weights.
        gate_up, down: one weight an expert.
    """

    products: Products
    gate_up: Sequence[LinearWeight]
    down: Sequence[LinearWeight]
    clamp: ClampedSwiglu | None = None
    scales_input: bool = False
    first: int = 0

    def with_biases(self, gate_up_E2I: torch.Tensor, down_ED: torch.Tensor) -> ListedExperts:
        """The same with biases."""

        def added(weights: Sequence[LinearWeight], biases: torch.Tensor) -> list[LinearWeight]:
            pairs = zip(weights, biases.float(), strict=True)
            return [dataclasses.replace(weight, bias=bias.contiguous()) for weight, bias in pairs]

        return dataclasses.replace(self, gate_up=added(self.gate_up, gate_up_E2I), down=added(self.down, down_ED))

    def run(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        kind: str,
        count: int,
        out_TD: torch.Tensor,
    ) -> None:
        """As `ops.moe_experts`, for the first `count` tokens."""
        out_TD.zero_()
        for number, tokens_S, choices_S in by_expert(ids_TK[:count]):
            expert = number - self.first
            if not 0 <= expert < len(self.down):
                continue
            weight_S1 = weights_TK[tokens_S, choices_S, None]
            x_SD = x_TD[tokens_S]
            given_SD = self._run_one(expert, x_SD * weight_S1.to(x_SD.dtype) if self.scales_input else x_SD, kind)
            out_TD.index_add_(0, tokens_S, given_SD if self.scales_input else given_SD * weight_S1.to(given_SD.dtype))

    def _run_one(self, expert: int, x_SD: torch.Tensor, kind: str) -> torch.Tensor:
        wide, down = self.gate_up[expert], self.down[expert]
        wide_SX = x_SD.new_empty(len(x_SD), wide.out_features)
        self.products.apply(x_SD, wide, wide_SX)
        activated_SI = wide_SX
        if wide.out_features == down.in_features:
            ops.activation(wide_SX, kind)
        else:
            activated_SI = x_SD.new_empty(len(x_SD), down.in_features)
            self._gate(wide_SX, kind, activated_SI)
        out_SD = x_SD.new_empty(len(x_SD), down.out_features)
        self.products.apply(activated_SI, down, out_SD)
        return out_SD

    def _gate(self, wide_S2I: torch.Tensor, kind: str, out_SI: torch.Tensor) -> None:
        if self.clamp is None:
            ops.gated_activation(wide_S2I, kind, out_SI)
            return
        gate, up = wide_S2I.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.clamp.limit), up.clamp(-self.clamp.limit, self.clamp.limit)
        out_SI.copy_(gate * torch.sigmoid(self.clamp.alpha * gate) * (up + self.clamp.offset))


class Mixture:
    """Routed experts, and the feed-forward that every token takes besides, if there is one.

    Args:
        shared: what every token takes, without its last matrix.
        scratch: buffers that all mixtures of a model use in turn.
    """

    EXPERTS = {
        "experts_gate_up": "gate_up_E2ID",
        "experts_down": "down_EDI",
        "experts_gate_up_bias": "gate_up_bias_E2I",
        "experts_down_bias": "down_bias_ED",
    }
    """Names of the experts' weights, and what `ExpertWeights` calls them."""
    CODES = {"experts_gate_up": "gate_up_codes", "experts_down": "down_codes"}
    """Which of them may be codes, and what it calls those."""

    def __init__(
        self, mlp: MoE, context: LayerContext, shared: DenseFeedForward | None, scratch: ExpertScratch
    ) -> None:
        self.mlp, self.routing, self.activation = mlp, mlp.routing, kernel_activation(mlp.act)
        self.token_ids = torch.empty(0)
        """Of the step, for mixtures that choose by them."""
        self._context, self._method, self._shared, self._scratch = context, context.linear_method, shared, scratch
        first = context.plan.experts(mlp.num_experts).start
        self._options = {"clamp": mlp.clamp, "scales_input": mlp.scales_input, "first": first}
        self._linears: dict[str, LinearWeight] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._experts: ExpertWeights | None = None
        self._codes: dict[str, ExpertCodes] = {}
        self._listed: dict[str, list[LinearWeight]] = {}
        self._one_by_one: ListedExperts | None = None

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights; a list has one weight an expert."""
        plan = self._context.plan
        if plan.rank > 0 and (name == "experts_bias" or (name == "experts_down_bias" and not plan.expert_parallel)):
            weight = torch.zeros_like(cast(torch.Tensor, weight))  # summed over ranks: one adds it
        if plan.rank > 0 and name == "experts_out":
            weight = dataclasses.replace(cast(LinearWeight, weight), bias=None)
        if isinstance(weight, list):
            is_gated = name == "experts_gate_up" and self.mlp.is_gated
            weight = self._method.ready_experts(weight, is_gated=is_gated)
        if isinstance(weight, ExpertCodes):
            self._codes[self.CODES[name]] = weight
            weight = weight.shape_only()
        if isinstance(weight, LinearWeight):
            self._linears[name] = weight
        elif isinstance(weight, list):
            self._listed[name] = weight
        else:
            self._tensors[name] = cast(torch.Tensor, weight)
        awaited = 4 if self.mlp.experts_bias else 2
        if name in self.EXPERTS and len({*self._listed, *self._tensors} & {*self.EXPERTS}) == awaited:
            self._build_experts()

    def _build_experts(self) -> None:
        """Put the experts' matrices and biases together, once all are there."""
        there = {name: self._tensors[name] for name in self.EXPERTS if name in self._tensors}
        if not self._listed:
            fields = {self.EXPERTS[name]: tensor for name, tensor in there.items()}
            self._experts = ops.pack_experts(ExpertWeights(**fields, **self._codes, **self._options))
            for name in there:
                del self._tensors[name]
            return
        gate_up, down = (
            self._listed.get(name) or [ops.pack_linear(matrix) for matrix in there[name]]
            for name in ("experts_gate_up", "experts_down")
        )
        listed = ListedExperts(self._method, gate_up, down, **self._options)
        if self.mlp.experts_bias:
            listed = listed.with_biases(there["experts_gate_up_bias"], there["experts_down_bias"])
        self._one_by_one = listed

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, num_tokens: torch.Tensor, views: TokenViews) -> None:
        """out = the mixture of x, this rank's part of it. `views` has room for the shared feed-forward."""
        ids_TK, weights_TK = self._choose(x_TD, num_tokens)
        read, given = x_TD, views.beside_TD if self.mlp.late else out_TD
        if self.mlp.latent:
            read, given = views.narrow(self.mlp.latent), views.wide(self.mlp.latent)
            self._method.apply(x_TD, self._linears["experts_in"], read)
        self._run_experts(read, ids_TK, weights_TK, num_tokens, given)
        if self.mlp.latent:
            self._method.apply(given, self._linears["experts_out"], out_TD)
        if self.mlp.zero_experts and self._context.plan.rank == 0:  # experts without matrices give what they read
            experts.add_chosen_inputs(x_TD, ids_TK, weights_TK, self.mlp.num_experts, given)
        if "experts_bias" in self._tensors:
            given.add_(self._tensors["experts_bias"])
        if self._shared is None:
            return
        activated_TI = self._activate_shared(self._shared, x_TD, views)
        if self.mlp.late:
            self._method.apply(activated_TI, self._linears["shared_down"], out_TD)
        else:
            shared_TD = views.wide(x_TD.shape[1]) if self.mlp.latent else self._scratch.out_PD[: len(x_TD)]
            self._method.apply(activated_TI, self._linears["shared_down"], shared_TD)
            ops.add(shared_TD, out_TD)

    def _choose(self, x_TD: torch.Tensor, num_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts and their weights, both [T, K]."""
        count, scratch = x_TD.shape[0], self._scratch
        logits_TE, ids_TK, weights_TK = scratch.logits_TE[:count], scratch.ids_TK[:count], scratch.weights_TK[:count]
        ops.linear(x_TD, self._linears["router"], logits_TE)
        if self.routing.cap > 0:
            ops.scale_and_cap(logits_TE, 1.0, self.routing.cap)
        bias_E, table_VK = self._tensors.get("router_bias"), self._tensors.get("token_experts")
        if table_VK is not None or self.routing.scoring == "sqrtsoftplus":
            chosen_TK = None if table_VK is None else table_VK[self.token_ids[:count].long()].long()
            experts.route_plainly(logits_TE, self.routing, bias_E, chosen_TK, ids_TK, weights_TK)
        else:
            ops.moe_route(logits_TE, self.routing, num_tokens, ids_TK, weights_TK, bias_E)
        if "expert_scales" in self._tensors:
            experts.scale_choices(weights_TK, ids_TK, self._tensors["expert_scales"])
        return ids_TK, weights_TK

    def _run_experts(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        num_tokens: torch.Tensor,
        out_TD: torch.Tensor,
    ) -> None:
        if self._one_by_one is not None:
            self._one_by_one.run(x_TD, ids_TK, weights_TK, self.activation, int(num_tokens[0]), out_TD)
        else:
            weights, scratch = self._weights(), self._scratch
            ops.moe_experts(x_TD, ids_TK, weights_TK, weights, self.activation, num_tokens, out_TD, scratch)

    def run_normed(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, num_tokens: torch.Tensor, views: TokenViews
    ) -> None:
        """x += the mixture of rms_norm(x), on a platform that has kernels for all of it. `views` gives room."""
        activated_TI = None
        if self._shared is not None:
            ops.rms_norm(x_TD, norm_D, eps, views.normed_TD)
            activated_TI = self._activate_shared(self._shared, views.normed_TD, views)
        router, bias_E, weights = self._linears["router"], self._tensors.get("router_bias"), self._weights()
        room = (num_tokens, views.normed_TD, self._scratch)
        ops.norm_moe(x_TD, norm_D, eps, router, self.routing, weights, self.activation, *room, bias_E)
        if activated_TI is not None:
            self._method.apply_add(activated_TI, self._linears["shared_down"], x_TD, views.delta_TD)

    def _weights(self) -> ExpertWeights:
        assert self._experts is not None, "the experts' weights were not loaded"
        return self._experts

    def _activate_shared(self, shared: DenseFeedForward, x_TD: torch.Tensor, views: TokenViews) -> torch.Tensor:
        """What the last matrix of the shared feed-forward reads."""
        activated_TI = shared.activate(
            HalfInput(self._method, lambda views: x_TD), self._linears["shared_gate_up"], views
        )
        if "shared_gate" in self._linears:
            gate_T1 = self._scratch.logits_TE.view(-1)[: x_TD.shape[0]].view(-1, 1)
            ops.linear(x_TD, self._linears["shared_gate"], gate_T1)
            ops.sigmoid_gate(activated_TI, gate_T1)
        if isinstance(shared.mlp, GatedMLP) and shared.mlp.out_scale != 1.0:
            ops.scale_and_cap(activated_TI, shared.mlp.out_scale, 0.0)
        return activated_TI


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
        norms, eps, communicator = self._tensors, cast(RMSNorm, self.mlp.own_norms).eps, self._context.communicator
        residual_TD, beside_TD = views.residual_TD, views.beside_TD
        activated_TI = self._activate_shared(cast(DenseFeedForward, self._shared), x_TD, views)
        self._method.apply(activated_TI, self._linears["shared_down"], out_TD)
        communicator.all_reduce(out_TD)
        ops.rms_norm(out_TD, norms["shared_after"], eps, out_TD)
        ops.rms_norm(residual_TD, norms["router_scale"], eps, x_TD)
        choice = self._choose(x_TD, num_tokens)
        ops.rms_norm(residual_TD, norms["experts_before"], eps, x_TD)
        self._run_experts(x_TD, *choice, num_tokens, beside_TD)
        communicator.all_reduce(beside_TD)
        ops.rms_norm(beside_TD, norms["experts_after"], eps, beside_TD)
        ops.add(beside_TD, out_TD)
