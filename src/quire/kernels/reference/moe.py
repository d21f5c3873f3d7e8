"""Reference mixtures of experts: routing, and each expert that a token chose applied to its tokens.

Legend: T tokens, E experts, K experts a token, G groups of experts, D hidden, I intermediate.
"""

import torch
from torch import Tensor

from quire.kernels.experts import ExpertScratch, ExpertWeights, Routing
from quire.kernels.ops import LinearWeight
from quire.kernels.reference.elementwise import ACTIVATIONS, rms_norm
from quire.kernels.reference.linear import linear
from quire.kernels.registry import kernel

SCORINGS = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


@kernel("moe_route", platform="any")
def moe_route(
    logits_TE: Tensor,
    routing: Routing,
    num_tokens: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    bias_E: Tensor | None = None,
) -> None:
    logits_TE = logits_TE.float()
    if routing.scoring == "sparsemixer":
        _sparsemixer(logits_TE, routing, ids_TK, weights_TK)
        return
    _route(logits_TE, routing, bias_E, None, ids_TK, weights_TK)


@kernel("route_plainly", platform="any")
def _route(
    logits_TE: Tensor,
    routing: Routing,
    bias_E: Tensor | None,
    chosen_TK: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> None:
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


@kernel("add_chosen_inputs", platform="any")
def add_chosen_inputs(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, first: int, out_TD: Tensor) -> None:
    weight_T1 = (weights_TK * (ids_TK >= first)).sum(-1, keepdim=True)
    out_TD.add_((x_TD.float() * weight_T1).to(out_TD.dtype))


@kernel("scale_choices", platform="any")
def scale_choices(weights_TK: Tensor, ids_TK: Tensor, scales_E: Tensor) -> None:
    weights_TK.mul_(scales_E[ids_TK.long()])


@kernel("pack_experts", platform="any")
def pack_experts(experts: ExpertWeights) -> ExpertWeights:
    return experts


@kernel("moe_experts", platform="any")
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
    gate, up = gate_up.chunk(2, dim=-1)
    if experts.clamp is None:
        return ACTIVATIONS[kind](gate) * up
    gate = gate.clamp(max=experts.clamp.limit)
    up = up.clamp(-experts.clamp.limit, experts.clamp.limit)
    return gate * torch.sigmoid(experts.clamp.alpha * gate) * (up + experts.clamp.offset)


@kernel("norm_moe", platform="any")
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
    count = x_TD.shape[0]
    logits_TE, ids_TK, weights_TK = scratch.logits_TE[:count], scratch.ids_TK[:count], scratch.weights_TK[:count]
    rms_norm(x_TD, norm_D, eps, scratch_TD)
    linear(scratch_TD, router, logits_TE)
    moe_route(logits_TE, routing, num_tokens, ids_TK, weights_TK, bias_E)
    x_TD.copy_(x_TD.float() + _mixture(scratch_TD, ids_TK, weights_TK, experts, kind))


@kernel("sigmoid_gate", platform="any")
def sigmoid_gate(x_TI: Tensor, gate_T1: Tensor) -> None:
    x_TI.copy_(x_TI.float() * gate_T1.float().sigmoid())
