"""Mixtures of experts: how tokens choose experts, and what the chosen ones give.

Legend: T tokens, E experts, K experts a token (top_k), G groups of experts, D hidden, I an expert's intermediate size
on this rank.
"""

import torch
from torch import Tensor

from quire.kernels.linear import linear
from quire.kernels.norm import ACTIVATIONS, gated, rms
from quire.kernels.registry import operation, reference
from quire.kernels.types import ExpertScratch, ExpertWeights, LinearWeight, Routing

SCORINGS = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


@operation
def moe_route(
    logits_TE: Tensor,
    routing: Routing,
    num_tokens: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    bias_E: Tensor | None = None,
) -> None:
    """Each token's experts, best first, as int32, and their float32 weights. Of T rows the first num_tokens[0] (int64, on
    the device) are the step's: the rest may be left as they were."""
    logits_TE = logits_TE.float()
    if routing.scoring == "sparsemixer":
        _sparsemixer(logits_TE, routing, ids_TK, weights_TK)
        return
    reference(route_plainly)(logits_TE, routing, bias_E, None, ids_TK, weights_TK)


@operation
def route_plainly(
    logits_TE: Tensor,
    routing: Routing,
    bias_E: Tensor | None,
    chosen_TK: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> None:
    """As `ops.moe_route`, for what its kernels do not know: scores by the root of softplus, and experts that are chosen
    already."""
    scores_TE = SCORINGS[routing.scoring](logits_TE.float())
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if routing.top_groups < routing.groups:
        grouped_TGE = ranked_TE.unflatten(-1, (routing.groups, -1))
        worth_TG = grouped_TGE.topk(1 if bias_E is None else 2, dim=-1).values.sum(-1)
        closed_TG = torch.ones_like(worth_TG, dtype=torch.bool)
        best_TG = worth_TG.sort(dim=-1, descending=True, stable=True).indices
        closed_TG.scatter_(-1, best_TG[:, : routing.top_groups], False)
        ranked_TE = grouped_TGE.masked_fill(closed_TG[..., None], float("-inf")).flatten(-2)
    best_TE = ranked_TE.sort(dim=-1, descending=True, stable=True).indices
    chosen_TK = best_TE[:, : routing.top_k] if chosen_TK is None else chosen_TK
    weights = scores_TE.gather(-1, chosen_TK)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    ids_TK.copy_(chosen_TK)
    weights_TK.copy_(weights * routing.scale)


def _sparsemixer(logits_TE: Tensor, routing: Routing, ids_TK: Tensor, weights_TK: Tensor) -> None:
    left_TE = logits_TE.clone()
    for k in range(routing.top_k):
        best_T1, expert_T1 = left_TE.max(-1, keepdim=True)
        reach_TE = 2 * routing.jitter * torch.maximum(logits_TE.abs(), best_T1)
        share_TE = left_TE.masked_fill(best_T1 - logits_TE > reach_TE, float("-inf")).softmax(-1)
        ids_TK[:, k : k + 1] = expert_T1
        weights_TK[:, k : k + 1] = share_TE.gather(-1, expert_T1) * routing.scale
        left_TE.scatter_(-1, expert_T1, float("-inf"))


@operation
def add_chosen_inputs(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, first: int, out_TD: Tensor) -> None:
    """out[t] += x[t] times the sum of the token's weights for experts from `first` on."""
    weight_T1 = (weights_TK * (ids_TK >= first)).sum(-1, keepdim=True)
    out_TD.add_((x_TD.float() * weight_T1).to(out_TD.dtype))


@operation
def scale_choices(weights_TK: Tensor, ids_TK: Tensor, scales_E: Tensor) -> None:
    """weights[t, k] *= scales[ids[t, k]], in place; the scales are float32."""
    weights_TK.mul_(scales_E[ids_TK.long()])


@operation
def pack_experts(experts: ExpertWeights) -> ExpertWeights:
    """Prepare experts for `moe_experts`. May drop the original layout: what remains tells shapes and types."""
    return experts


@operation
def expert_matrices(experts: ExpertWeights, number: int) -> tuple[list[LinearWeight], LinearWeight]:
    """One expert's matrices for `linear`, without biases, where they are values: gate's and up's (one under the other, or each by
    itself), and down's. They share the experts' memory."""
    return [_alone(experts.gate_up_E2ID[number])], _alone(experts.down_EDI[number])


def _alone(matrix_NK: Tensor) -> LinearWeight:
    return LinearWeight(matrix_NK.shape[0], matrix_NK.shape[1], matrix_NK.dtype, matrix_NK)


@operation
def moe_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertWeights,
    kind: str,
    num_tokens: Tensor,
    out_TD: Tensor,
    scratch: ExpertScratch,
) -> None:
    """out[t] = sum over k of weights[t, k] * down(act(gate(x[t])) * up(x[t])) of expert ids[t, k]; `kind` as in
    `activation`, and more as `ExpertWeights` says. Of T rows the first num_tokens[0] are the step's. `out` is not `x`."""
    out_TD.copy_(_mixture(x_TD, ids_TK, weights_TK, experts, kind))


def _mixture(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ExpertWeights, kind: str) -> Tensor:
    dtype = experts.gate_up_E2ID.dtype
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    # One expert after another, in the order of their numbers; those that no token chose are not touched.
    pairs = ids_TK.flatten().sort(stable=True)
    hit, counts = pairs.values.unique_consecutive(return_counts=True)
    for number, chosen in zip(hit.tolist(), pairs.indices.split(counts.tolist()), strict=True):
        expert = number - experts.first
        if not 0 <= expert < experts.count:
            continue
        tokens, slots = chosen // ids_TK.shape[1], chosen % ids_TK.shape[1]
        weight, x = weights_TK[tokens, slots, None], x_TD[tokens]
        if experts.scales_input:
            x = x.float() * weight
        gate_up = torch.nn.functional.linear(x.to(dtype), experts.gate_up_E2ID[expert]).float()
        if experts.gate_up_bias_E2I is not None:
            gate_up = gate_up + experts.gate_up_bias_E2I[expert]
        activated = _activate(gate_up, experts, kind).to(x_TD.dtype).to(dtype)
        out = torch.nn.functional.linear(activated, experts.down_EDI[expert]).float()
        if experts.down_bias_ED is not None:
            out = out + experts.down_bias_ED[expert]
        out_TD.index_add_(0, tokens, out if experts.scales_input else out * weight)
    return out_TD


def _activate(gate_up: Tensor, experts: ExpertWeights, kind: str) -> Tensor:
    if not experts.is_gated:
        return ACTIVATIONS[kind](gate_up)
    if experts.clamp is None:
        return gated(gate_up, kind)
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=experts.clamp.limit)
    up = up.clamp(-experts.clamp.limit, experts.clamp.limit)
    return gate * torch.sigmoid(experts.clamp.alpha * gate) * (up + experts.clamp.offset)


@operation
def norm_moe(
    x_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    router: LinearWeight,
    routing: Routing,
    experts: ExpertWeights,
    kind: str,
    num_tokens: Tensor,
    scratch_TD: Tensor,
    scratch: ExpertScratch,
    bias_E: Tensor | None = None,
) -> None:
    """y = rms_norm(x), routed by y @ router.T, then x += the mixture of y's experts. scratch_TD may be overwritten."""
    count = x_TD.shape[0]
    logits_TE, ids_TK, weights_TK = scratch.logits_TE[:count], scratch.ids_TK[:count], scratch.weights_TK[:count]
    scratch_TD.copy_(rms(x_TD, norm_D, eps))
    reference(linear)(scratch_TD, router, logits_TE)
    reference(moe_route)(logits_TE, routing, num_tokens, ids_TK, weights_TK, bias_E)
    x_TD.copy_(x_TD.float() + _mixture(scratch_TD, ids_TK, weights_TK, experts, kind))
