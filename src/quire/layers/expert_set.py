"""A mixture's experts on one rank: their matrices in stacks, or each by itself.

Knows which experts these are, and when all of their weights are there. How tokens choose is `moe.py`'s business.
Legend: T tokens, E experts, K experts a token, D hidden, I intermediate, S tokens of one expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from quire.kernels import experts, ops
from quire.kernels.types import ClampedSwiglu, ExpertCodes, ExpertScratch, ExpertWeights, LinearWeight
from quire.layers.assembly import Weight
from quire.layers.interface import LayerContext
from quire.layers.linear import LinearMethod
from quire.models.spec import MoE


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
        gate_up: of each expert one matrix, or the gate's and up's.
        down: one weight an expert.
        name: of the set, by which adapters find its matrices.
    """

    products: LinearMethod
    gate_up: Sequence[Sequence[LinearWeight]]
    down: Sequence[LinearWeight]
    name: str = ""
    clamp: ClampedSwiglu | None = None
    scales_input: bool = False
    first: int = 0

    def with_biases(self, gate_up_E2I: torch.Tensor, down_ED: torch.Tensor) -> ListedExperts:
        """The same with biases."""

        def added(weights: Sequence[LinearWeight], biases: Sequence[torch.Tensor]) -> list[LinearWeight]:
            pairs = zip(weights, biases, strict=True)
            return [dataclasses.replace(weight, bias=bias.contiguous()) for weight, bias in pairs]

        gate_up = [
            added(each, bias_I.float().split([weight.out_features for weight in each]))
            for each, bias_I in zip(self.gate_up, gate_up_E2I, strict=True)
        ]
        return dataclasses.replace(self, gate_up=gate_up, down=added(self.down, list(down_ED.float())))

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
            read_SD = x_SD * weight_S1.to(x_SD.dtype) if self.scales_input else x_SD
            given_SD = self._run_one(expert, read_SD, tokens_S, kind)
            out_TD.index_add_(0, tokens_S, given_SD if self.scales_input else given_SD * weight_S1.to(given_SD.dtype))

    def _run_one(self, expert: int, x_SD: torch.Tensor, tokens_S: torch.Tensor, kind: str) -> torch.Tensor:
        parts, down = self.gate_up[expert], self.down[expert]
        wide_parts = [x_SD.new_empty(len(x_SD), part.out_features) for part in parts]
        for part, part_SI in zip(parts, wide_parts, strict=True):
            self.products.apply(x_SD, part, part_SI)
        wide_SX = wide_parts[0] if len(parts) == 1 else torch.cat(wide_parts, dim=1)
        self.products.adapt_one(f"{self.name}_gate_up", expert, x_SD, tokens_S, wide_SX)
        activated_SI = wide_SX
        if wide_SX.shape[1] == down.in_features:
            ops.activation(wide_SX, kind)
        else:
            activated_SI = x_SD.new_empty(len(x_SD), down.in_features)
            self._gate(wide_SX, kind, activated_SI)
        out_SD = x_SD.new_empty(len(x_SD), down.out_features)
        self.products.apply(activated_SI, down, out_SD)
        self.products.adapt_one(f"{self.name}_down", expert, activated_SI, tokens_S, out_SD)
        return out_SD

    def _gate(self, wide_S2I: torch.Tensor, kind: str, out_SI: torch.Tensor) -> None:
        if self.clamp is None:
            ops.gated_activation(wide_S2I, kind, out_SI)
            return
        gate, up = wide_S2I.float().chunk(2, dim=-1)
        limit, gate_limit = self.clamp.limit, self.clamp.gate_limit
        gate, up = gate.clamp(max=limit if gate_limit is None else gate_limit), up.clamp(-limit, limit)
        out_SI.copy_(gate * torch.sigmoid(self.clamp.alpha * gate) * (up + self.clamp.offset))


class ExpertSet:
    """Consecutive experts of a mixture: those that a router chooses among, or those of every token.

    Args:
        first: the number of the first one on this rank.
        name: what the names of their weights begin with.
        layer: what stands before these names.
    """

    FIELDS = {
        "gate_up": "gate_up_E2ID",
        "down": "down_EDI",
        "gate_up_bias": "gate_up_bias_E2I",
        "down_bias": "down_bias_ED",
    }
    """Names of the experts' weights, and what `ExpertWeights` calls them."""
    CODES = {"gate_up": "gate_up_codes", "down": "down_codes"}
    """Which of them may be codes, and what it calls those."""

    def __init__(self, mlp: MoE, context: LayerContext, first: int, name: str, layer: str) -> None:
        self.mlp, self._context, self._method, self._name = mlp, context, context.linear_method, name
        self._full_name = f"{layer}.{name}"
        self._options = {"clamp": mlp.clamp, "scales_input": mlp.scales_input, "first": first}
        self._there: dict[str, torch.Tensor | list[LinearWeight]] = {}
        self._codes: dict[str, ExpertCodes] = {}
        self._stacked: ExpertWeights | None = None
        self._with_room: ExpertWeights | None = None
        self._listed: ListedExperts | None = None

    @property
    def is_listed(self) -> bool:
        """Whether they stay apart in every format, since kernels do not know what they compute."""
        return self.mlp.clamp is not None and self.mlp.clamp.gate_limit is not None

    @property
    def weights(self) -> ExpertWeights:
        """Those in stacks."""
        assert self._stacked is not None, "the experts' weights were not loaded"
        return self._stacked

    def make_room(self, places: int, first: int) -> bool:
        """Have so many places, of which the experts that were read take the first; `first` is the router's number of the first
        place. False: they have them."""
        weights = self.weights
        if weights is self._with_room:
            return False
        tensors = {
            name: torch.cat((each, each.new_zeros(places * len(each) // weights.count - len(each), *each.shape[1:])))
            for name, each in vars(weights).items()
            if isinstance(each, torch.Tensor)
        }
        self._stacked = self._with_room = dataclasses.replace(weights, **tensors, first=first)
        return True

    def tensors(self) -> list[torch.Tensor]:
        """Everything that experts consist of, each with an equal part for each place."""
        return [each for each in vars(self.weights).values() if isinstance(each, torch.Tensor) and not each.is_meta]

    @property
    def is_adapted(self) -> bool:
        """Whether adapters change their matrices in the step that is computed."""
        return any(self._method.adapts(f"{self._full_name}_{field}") for field in self.CODES)

    @property
    def fixed(self) -> str:
        """Why adapters cannot change their matrices; empty: they can."""
        return "has its experts in one piece, as their number format wants it" if self._codes else ""

    def _apart(self) -> ListedExperts:
        """Those in stacks, each by itself."""
        pairs = [experts.expert_matrices(self.weights, number) for number in range(self.weights.count)]
        gate_up, down = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        listed = ListedExperts(self._method, gate_up, down, self._full_name, **self._options)
        if self.weights.gate_up_bias_E2I is not None and self.weights.down_bias_ED is not None:
            listed = listed.with_biases(self.weights.gate_up_bias_E2I, self.weights.down_bias_ED)
        return listed

    def takes(self, name: str) -> bool:
        """Whether a weight is of these experts."""
        return name.removeprefix(f"{self._name}_") in self.FIELDS and name.startswith(self._name)

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of them; a list has one weight an expert."""
        field, plan = name.removeprefix(f"{self._name}_"), self._context.plan
        if field == "down_bias" and plan.rank > 0 and not plan.expert_parallel:
            weight = torch.zeros_like(cast(torch.Tensor, weight))  # summed over ranks: one adds it
        if isinstance(weight, list):
            weight = self._method.ready_experts(weight, is_gated=field == "gate_up" and self.mlp.is_gated)
        if isinstance(weight, ExpertCodes):
            self._codes[self.CODES[field]] = weight
            weight = weight.shape_only()
        self._there[field] = cast("torch.Tensor | list[LinearWeight]", weight)
        if len(self._there) == (4 if self.mlp.experts_bias else 2):
            self._build()
            if self._listed is None:  # packed: nothing uses the plain layout any more
                self._there = {}

    def _build(self) -> None:
        """Put matrices and biases together."""
        tensors = {name: each for name, each in self._there.items() if isinstance(each, torch.Tensor)}
        if len(tensors) == len(self._there) and not self.is_listed:
            fields = {self.FIELDS[name]: tensor for name, tensor in tensors.items()}
            self._stacked = ops.pack_experts(ExpertWeights(**fields, **self._codes, **self._options))
            return
        gate_up, down = (
            each if isinstance(each, list) else [ops.pack_linear(matrix) for matrix in each]
            for each in (self._there["gate_up"], self._there["down"])
        )
        self._listed = ListedExperts(self._method, [[each] for each in gate_up], down, self._full_name, **self._options)
        if self.mlp.experts_bias:
            self._listed = self._listed.with_biases(tensors["gate_up_bias"], tensors["down_bias"])

    def run(
        self,
        x_TD: torch.Tensor,
        choice: tuple[torch.Tensor, torch.Tensor],
        kind: str,
        num_tokens: torch.Tensor,
        out_TD: torch.Tensor,
        scratch: ExpertScratch,
    ) -> None:
        """out = what these experts give, by the experts of each token and their weights; others' are passed over."""
        listed = self._apart() if self._listed is None and self.is_adapted else self._listed
        if listed is not None:
            listed.run(x_TD, *choice, kind, int(num_tokens[0]), out_TD)
        else:
            ops.moe_experts(x_TD, *choice, self.weights, kind, num_tokens, out_TD, scratch)
