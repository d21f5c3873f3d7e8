"""What the operations of mixtures of experts share: how tokens choose, the experts' stacked weights, and room to work in.

Knows shapes. Computes nothing but what only some mixtures need.
Legend: T tokens, E experts, K experts a token (top_k), D hidden, I an expert's intermediate size on this rank.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from quire.kernels.packed import ExpertCodes


@dataclasses.dataclass(frozen=True)
class Routing:
    """From a token's logits over experts to its experts and their weights.

    Scores are softmax, sigmoid or the root of softplus of the logits, in float32. The `top_k` largest are chosen (of equals the
    first, also of groups); with a bias (DeepSeek-V3's `e_score_correction_bias`) the largest of score + bias, but weights stay
    the scores.
    Softmax with `renormalize` is also the softmax over the chosen logits alone.

    `sparsemixer` (https://arxiv.org/abs/2409.12136, as evaluated) chooses by the logits; a choice's weight is its softmax
    over the experts that no earlier choice took and whose logit l is close to the choice's own c:
    c - l <= 2 * jitter * max(|l|, c).

    Attributes:
        renormalize: a token's weights are divided by their sum.
        groups, top_groups: experts come in equal groups, and only those of the best groups can be chosen. A group is worth
            its largest score, or with a bias the sum of its two largest (score + bias).
        scale: multiplies the weights, last.
        jitter: of `sparsemixer`.
        cap: logits become cap * tanh(logits / cap) before they are routed; 0 means they do not.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer", "sqrtsoftplus"] = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    jitter: float = 0.0
    cap: float = 0.0


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """GptOss' way from gate and up to the activation: with g = min(gate, limit), g * sigmoid(alpha * g) * (offset + up between
    -limit and limit); the offset is 1 or 0."""

    alpha: float
    limit: float
    offset: int = 1


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """A layer's experts on one rank. Here E are the rank's own.

    Attributes:
        gate_up_E2ID: rows are the gate's, then up's; [E, I, D] where experts have no gate.
        down_EDI: the way back.
        gate_up_bias_E2I, down_bias_ED: float32, or None.
        clamp: in place of the activation that an operation is told.
        scales_input: a token's weight multiplies what its expert reads rather than what it gives.
        first: the router's number of the first expert here; a token's experts on other ranks add nothing.
        gate_up_codes, down_codes: a matrix in the place of the one above, which has a shape and no values then (`meta`).
    """

    gate_up_E2ID: torch.Tensor
    down_EDI: torch.Tensor
    gate_up_bias_E2I: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    clamp: ClampedSwiglu | None = None
    scales_input: bool = False
    first: int = 0
    gate_up_codes: "ExpertCodes | None" = None
    down_codes: "ExpertCodes | None" = None

    @property
    def count(self) -> int:
        """E."""
        return self.down_EDI.shape[0]

    @property
    def is_gated(self) -> bool:
        """Whether an expert is down(act(gate(x)) * up(x)) rather than down(act(up(x)))."""
        return self.gate_up_E2ID.shape[1] != self.intermediate

    @property
    def intermediate(self) -> int:
        """I."""
        return self.down_EDI.shape[2]


class ExpertScratch:
    """Buffers that every mixture of a model uses, one after another: allocated once, for the largest step.

    Attributes:
        capacity: tokens it is made for.
        logits_TE: float32.
        ids_TK: int32; a token's experts.
        weights_TK: float32; what their outputs are multiplied with.
        activated_PI: model type; P = T * K pairs of a token and one of its experts, or T where kernels keep pairs elsewhere.
        out_PD: model type; what each pair's expert gives.
        lists_ET: int32; each expert's pairs in any order.
        counts_E: int32; how many those are. Zero between operations: who reads it last clears it.
    """

    def __init__(
        self,
        *,
        capacity: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        device: torch.device,
        has_pairs: bool = True,
    ) -> None:
        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.capacity = capacity
        self.logits_TE = buffer(capacity, num_experts, dtype=torch.float32)
        self.ids_TK = buffer(capacity, top_k, dtype=torch.int32)
        self.weights_TK = buffer(capacity, top_k, dtype=torch.float32)
        pairs = capacity * top_k if has_pairs else capacity
        self.activated_PI = buffer(pairs, intermediate, dtype=dtype)
        self.out_PD = buffer(pairs, hidden, dtype=dtype)
        self.lists_ET = buffer(num_experts, capacity if has_pairs else 0, dtype=torch.int32)
        self.counts_E = buffer(num_experts, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(value.numel() * value.element_size() for value in vars(self).values() if torch.is_tensor(value))


def route_plainly(
    logits_TE: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None,
    chosen_TK: torch.Tensor | None,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> None:
    """As `ops.moe_route`, for what its kernels do not know: scores by the root of softplus, and experts that are chosen
    already."""
    from quire.kernels import ops

    ops.chosen("route_plainly")(logits_TE, routing, bias_E, chosen_TK, ids_TK, weights_TK)


def add_chosen_inputs(
    x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, first: int, out_TD: torch.Tensor
) -> None:
    """out[t] += x[t] times the sum of the token's weights for experts from `first` on."""
    from quire.kernels import ops

    ops.chosen("add_chosen_inputs")(x_TD, ids_TK, weights_TK, first, out_TD)


def scale_choices(weights_TK: torch.Tensor, ids_TK: torch.Tensor, scales_E: torch.Tensor) -> None:
    """weights[t, k] *= scales[ids[t, k]], in place; the scales are float32."""
    from quire.kernels import ops

    ops.chosen("scale_choices")(weights_TK, ids_TK, scales_E)
