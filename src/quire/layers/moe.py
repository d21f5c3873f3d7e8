"""One layer's mixture of experts on one rank: its weights, and the order of its operations.

Knows which operation reads what. How tokens choose and how experts are computed are kernels' business; shared experts are
ordinary matrices and belong to the `LinearMethod`; routers and gates stay in the model's own number type.
Legend: T tokens, E experts, K experts a token, D hidden, I intermediate of the shared feed-forward.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from quire.kernels import experts, ops
from quire.kernels.types import ExpertCodes, ExpertScratch, ExpertWeights, LinearWeight, Routing
from quire.layers.linear import LinearMethod
from quire.layers.listed_experts import ListedExperts


class Room(Protocol):
    """A model's buffers for one step's tokens."""

    normed_TD: torch.Tensor
    delta_TD: torch.Tensor
    beside_TD: torch.Tensor

    def wide(self, columns: int) -> torch.Tensor: ...

    def narrow(self, columns: int) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class Shared:
    """The feed-forward that every token takes.

    Attributes:
        intermediate: its size on this rank.
        scale: multiplies its output.
        limit: of gate and up, as in `GatedMLP`.
    """

    intermediate: int
    is_gated: bool = True
    scale: float = 1.0
    limit: float = 0.0


class Mixture:
    """Routed experts, and the feed-forward that every token takes besides, if there is one.

    Args:
        routing: how a token chooses.
        options: fields of `ExpertWeights` that are no tensors.
        biased: whether the experts' matrices have biases.
        activation: the kernels' name of the experts' and the shared feed-forward's activation.
        shared: the feed-forward beside the experts, if there is one.
        scratch: buffers that all mixtures of a model use in turn.
        latent: size of what experts read and give, where that is not the model's.
        own: experts with matrices, of those that `routing` chooses from; the others give what they read, on rank 0.
        late: what experts give goes to `Room.beside_TD`.
    """

    EXPERTS = {
        "experts_gate_up": "gate_up_E2ID", "experts_down": "down_EDI",
        "experts_gate_up_bias": "gate_up_bias_E2I", "experts_down_bias": "down_bias_ED",
    }  # fmt: skip
    """Names of the experts' weights, and what `ExpertWeights` calls them."""
    CODES = {"experts_gate_up": "gate_up_codes", "experts_down": "down_codes"}
    """Which of them may be codes, and what it calls those."""
    LATENT = ("experts_in", "experts_out")
    WEIGHTS = (
        "router", "router_bias", "token_experts", "expert_scales", "experts_bias", *LATENT, "shared_gate_up", "shared_down",
        "shared_gate", *EXPERTS,
    )  # fmt: skip

    def __init__(
        self,
        routing: Routing,
        options: Mapping[str, Any],
        biased: bool,
        activation: str,
        shared: Shared | None,
        method: LinearMethod,
        scratch: ExpertScratch,
        latent: int = 0,
        own: int | None = None,
        late: bool = False,
    ) -> None:
        self._own, self._late = own, late
        self.token_ids = torch.empty(0)
        """Of the step, for mixtures that choose by them."""
        self.routing, self.activation, self.shared = routing, activation, shared
        self._options, self._awaited = options, 4 if biased else 2
        self._method, self._scratch, self._latent = method, scratch, latent
        self._linears: dict[str, LinearWeight] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._experts: ExpertWeights | None = None
        self._codes: dict[str, ExpertCodes] = {}
        self._listed: dict[str, list[LinearWeight]] = {}
        self._one_by_one: ListedExperts | None = None

    def set_weight(self, name: str, weight: LinearWeight | torch.Tensor | list[LinearWeight]) -> None:
        """Take one of `WEIGHTS`; a list has one weight an expert."""
        if isinstance(weight, ExpertCodes):
            self._codes[self.CODES[name]] = weight
            weight = weight.shape_only()
        if isinstance(weight, LinearWeight):
            self._linears[name] = weight
            return
        if isinstance(weight, list):
            self._listed[name] = weight
        else:
            self._tensors[name] = weight
        if self._listed:  # the two matrices come one after the other, in any order
            self._build_listed()
            return
        there = {field: self._tensors[name] for name, field in self.EXPERTS.items() if name in self._tensors}
        if name in self.EXPERTS and len(there) == self._awaited:
            self._experts = ops.pack_experts(ExpertWeights(**there, **self._codes, **self._options))
            for each in self.EXPERTS:
                self._tensors.pop(each, None)

    def _build_listed(self) -> None:
        there = {*self._listed, *self._tensors} & {*self.EXPERTS}
        if len(there) < self._awaited:
            return
        gate_up, down = (
            self._listed.get(name) or [ops.pack_linear(matrix) for matrix in self._tensors[name]]
            for name in ("experts_gate_up", "experts_down")
        )
        biases = [self._tensors[name] for name in ("experts_gate_up_bias", "experts_down_bias") if name in there]
        listed = ListedExperts(self._method, gate_up, down, **self._options)
        self._one_by_one = listed.with_biases(*biases) if biases else listed

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, num_tokens: torch.Tensor, views: Room) -> None:
        """out = the mixture of x, this rank's part of it. `views` has room for the shared feed-forward."""
        ids_TK, weights_TK = self._choose(x_TD, num_tokens)
        read, given = x_TD, views.beside_TD if self._late else out_TD
        if self._latent:
            read, given = views.narrow(self._latent), views.wide(self._latent)
            self._method.apply(x_TD, self._linears["experts_in"], read)
        self._run_experts(read, ids_TK, weights_TK, num_tokens, given)
        if self._latent:
            self._method.apply(given, self._linears["experts_out"], out_TD)
        if self._own is not None:
            experts.add_chosen_inputs(x_TD, ids_TK, weights_TK, self._own, given)
        if "experts_bias" in self._tensors:
            given.add_(self._tensors["experts_bias"])
        if self._late and self.shared is not None:
            self._method.apply(self._activate_shared(x_TD, views, self.shared), self._linears["shared_down"], out_TD)
        elif self.shared is not None:
            shared_TD = views.wide(x_TD.shape[1]) if self._latent else self._scratch.out_PD[: len(x_TD)]
            self._method.apply(self._activate_shared(x_TD, views, self.shared), self._linears["shared_down"], shared_TD)
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
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, num_tokens: torch.Tensor, views: Room
    ) -> None:
        """x += the mixture of rms_norm(x), on a platform that has kernels for all of it. `views` gives room."""
        activated_TI = None
        if self.shared is not None:
            ops.rms_norm(x_TD, norm_D, eps, views.normed_TD)
            activated_TI = self._activate_shared(views.normed_TD, views, self.shared)
        ops.norm_moe(
            x_TD, norm_D, eps, self._linears["router"], self.routing, self._weights(), self.activation, num_tokens,
            views.normed_TD, self._scratch, self._tensors.get("router_bias"),
        )  # fmt: skip
        if activated_TI is not None:
            self._method.apply_add(activated_TI, self._linears["shared_down"], x_TD, views.delta_TD)

    def _weights(self) -> ExpertWeights:
        assert self._experts is not None, "the experts' weights were not loaded"
        return self._experts

    def _activate_shared(self, x_TD: torch.Tensor, views: Room, shared: Shared) -> torch.Tensor:
        activated_TI = views.narrow(shared.intermediate)
        if shared.is_gated:
            gate_up_T2I = views.wide(2 * shared.intermediate)
            self._method.apply(x_TD, self._linears["shared_gate_up"], gate_up_T2I)
            limit_halves(gate_up_T2I, shared.limit)
            ops.gated_activation(gate_up_T2I, self.activation, activated_TI)
        else:
            self._method.apply(x_TD, self._linears["shared_gate_up"], activated_TI)
            ops.activation(activated_TI, self.activation)
        if "shared_gate" in self._linears:
            gate_T1 = self._scratch.logits_TE.view(-1)[: x_TD.shape[0]].view(-1, 1)
            ops.linear(x_TD, self._linears["shared_gate"], gate_T1)
            ops.sigmoid_gate(activated_TI, gate_T1)
        if shared.scale != 1.0:
            ops.scale_and_cap(activated_TI, shared.scale, 0.0)
        return activated_TI


def limit_halves(gate_up_T2I: torch.Tensor, limit: float) -> None:
    """Keep gate at most at the limit, and up between minus and plus it; 0 means none."""
    if limit > 0:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        gate_TI.clamp_(max=limit)
        up_TI.clamp_(-limit, limit)
