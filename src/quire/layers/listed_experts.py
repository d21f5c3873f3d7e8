"""A mixture's experts as a list, each a weight of its own in any format: where the host may look at what a router chose.

Knows which rows go to which expert. Products are the format's; what stands between them is plain PyTorch, so that steps of such
mixtures run eagerly. Legend: T tokens, K experts a token, D hidden, I intermediate, S tokens of one expert.
"""

import dataclasses
from collections.abc import Sequence

import torch

from quire.kernels import ops
from quire.kernels.types import ClampedSwiglu, LinearWeight
from quire.layers.linear import Products


@dataclasses.dataclass(frozen=True)
class ListedExperts:
    """A layer's experts on one rank; fields that are not explained are those of `ExpertWeights`.

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

    def with_biases(self, gate_up_E2I: torch.Tensor, down_ED: torch.Tensor) -> "ListedExperts":
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
        ids_TK, weights_TK, top_k = ids_TK[:count], weights_TK[:count], ids_TK.shape[1]
        # One expert after another; those that no token chose are not touched.
        pairs = ids_TK.flatten().sort(stable=True)
        hit, counts = pairs.values.unique_consecutive(return_counts=True)
        for number, chosen in zip(hit.tolist(), pairs.indices.split(counts.tolist()), strict=True):
            expert = number - self.first
            if not 0 <= expert < len(self.down):
                continue
            tokens_S = chosen // top_k
            weight_S1 = weights_TK.flatten()[chosen, None]
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
