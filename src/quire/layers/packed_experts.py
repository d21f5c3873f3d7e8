"""A mixture's experts as small codes, each a packed weight of its own: where a device's host may look at what a router chose.

Knows which rows go to which expert. Products are `packed_linear`'s; what stands between them is plain PyTorch, so that steps of
such mixtures run eagerly. Legend: T tokens, K experts a token, D hidden, I intermediate, S tokens of one expert.
"""

import dataclasses
from collections.abc import Sequence

import torch

from quire.kernels import ops, packed
from quire.kernels.experts import ClampedSwiglu
from quire.kernels.packed import PackedWeight


@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """A layer's experts on one rank; the other fields are those of `ExpertWeights`.

    Attributes:
        gate_up, down: one weight an expert.
    """

    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    clamp: ClampedSwiglu | None = None
    scales_input: bool = False
    first: int = 0

    def with_biases(self, gate_up_E2I: torch.Tensor, down_ED: torch.Tensor) -> "PackedExperts":
        """The same with biases, which stand beside packed codes."""

        def added(weights: Sequence[PackedWeight], biases: torch.Tensor) -> list[PackedWeight]:
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
        gate_up_S2I = x_SD.new_empty(len(x_SD), wide.out_features)
        packed.packed_linear(x_SD, wide, gate_up_S2I)
        activated_SI = x_SD.new_empty(len(x_SD), down.in_features)
        if self.clamp is None:
            ops.gated_activation(gate_up_S2I, kind, activated_SI)
        else:
            gate, up = gate_up_S2I.float().chunk(2, dim=-1)
            gate, up = gate.clamp(max=self.clamp.limit), up.clamp(-self.clamp.limit, self.clamp.limit)
            activated_SI.copy_(gate * torch.sigmoid(self.clamp.alpha * gate) * (up + 1))
        out_SD = x_SD.new_empty(len(x_SD), down.out_features)
        packed.packed_linear(activated_SI, down, out_SD)
        return out_SD
