"""Mixtures for a few tokens, at the speed at which memory gives the experts' matrices: sums on the ordinary units.

A program has one pair of a token and an expert, or one token, and a few outputs, whose rows it reads once. The choice among
experts is so little work that every program of the first product makes it for itself: a launch less to wait for.

Legend: T tokens, E experts, K experts a token, D hidden, I intermediate; G groups of V values that one thread reads at once.
"""

import torch
import triton

from quire.kernels.triton.experts.route import choose, rank_keys, take_best
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.triton.norm.activations import KINDS, activate
from quire.kernels.types import ExpertScratch, ExpertWeights, Routing


@triton.jit
def _logits(logits_ptr, num_experts, BLOCK_E: tl.constexpr):
    expert_E = tl.arange(0, BLOCK_E)
    return tl.load(logits_ptr + expert_E, mask=expert_E < num_experts, other=float("-inf"))


@triton.jit
def _choose_one(
    logits_ptr,
    bias_ptr,
    num_experts,
    slot,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The expert in a slot."""
    logits_E = _logits(logits_ptr, num_experts, BLOCK_E)
    _, expert, keys_E = take_best(rank_keys(logits_E, bias_ptr, num_experts, SIGMOID, HAS_BIAS))
    for _ in range(slot):
        _, expert, keys_E = take_best(keys_E)
    return tl.minimum(expert, num_experts - 1)


@triton.jit
def few_gate_up_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    logits_ptr,
    bias_ptr,
    num_tokens_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    num_experts,
    D,
    I,  # noqa: E741
    eps,
    scale,
    ROUTES: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = act(gate) * up of x's row. ROUTES: x is normed first, and the pair's expert and weight come from logits and
    are written down; otherwise they stand in ids."""
    pair, block = tl.program_id(1), tl.program_id(0)
    token, slot = pair // K, pair % K
    row_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = row_N < I
    column_GV = tl.arange(0, BLOCK_K // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    await_previous(PDL, EARLY=True)
    if token >= tl.load(num_tokens_ptr):
        return
    if ROUTES:
        logits = logits_ptr + token * num_experts
        expert = _choose_one(logits, bias_ptr, num_experts, slot, SIGMOID, HAS_BIAS, BLOCK_E)
    else:
        expert = tl.load(ids_ptr + pair)
    gate_rows = w_ptr + (tl.cast(expert, tl.int64) * 2 * I + row_N)[None, :, None] * D
    up_rows = gate_rows + tl.cast(I, tl.int64) * D
    gate_GN = tl.zeros((BLOCK_K // VECTOR, BLOCK_N), dtype=tl.float32)
    up_GN = tl.zeros((BLOCK_K // VECTOR, BLOCK_N), dtype=tl.float32)
    squares_G = tl.zeros((BLOCK_K // VECTOR,), dtype=tl.float32)
    for start in range(0, D, BLOCK_K):
        at_GV = start + column_GV
        if EVEN:
            gate = tl.load(gate_rows + at_GV[:, None, :], eviction_policy="evict_first")
            up = tl.load(up_rows + at_GV[:, None, :], eviction_policy="evict_first")
        else:
            inside = inside_N[None, :, None] & (at_GV < D)[:, None, :]
            gate = tl.load(gate_rows + at_GV[:, None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            up = tl.load(up_rows + at_GV[:, None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        x_GV = tl.load(x_ptr + token * D + at_GV, mask=at_GV < D, other=0.0).to(tl.float32)
        if ROUTES:
            squares_G += tl.sum(x_GV * x_GV, axis=1)
            x_GV *= tl.load(norm_ptr + at_GV, mask=at_GV < D, other=0.0)
        gate_GN += tl.sum(gate.to(tl.float32) * x_GV[:, None, :], axis=2)
        up_GN += tl.sum(up.to(tl.float32) * x_GV[:, None, :], axis=2)
    gate_N, up_N = tl.sum(gate_GN, axis=0), tl.sum(up_GN, axis=0)
    if ROUTES:
        inverse = tl.rsqrt(tl.sum(squares_G, axis=0) / D + eps)
        gate_N *= inverse
        up_N *= inverse
    if ROUTES:  # noqa: SIM102
        if block == 0:
            slot_K = tl.arange(0, K_BLOCK)
            _, weights_K = choose(
                _logits(logits, num_experts, BLOCK_E),
                bias_ptr,
                num_experts,
                scale,
                SIGMOID,
                HAS_BIAS,
                RENORMALIZE,
                K,
                K_BLOCK,
            )
            tl.store(ids_ptr + pair, expert)
            tl.store(weights_ptr + pair, tl.sum(tl.where(slot_K == slot, weights_K, 0.0), axis=0))
    y_N = activate(gate_N, KIND) * up_N
    tl.store(out_ptr + pair * I + row_N, y_N.to(out_ptr.dtype.element_ty), mask=inside_N)


@triton.jit
def few_down_kernel(
    x_ptr,
    w_ptr,
    num_tokens_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    D,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token] (+)= the weighted sum over its experts of what they make of their activations: one long sum over K * I."""
    token, block = tl.program_id(1), tl.program_id(0)
    row_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = row_N < D
    column_GV = tl.arange(0, BLOCK_K // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    await_previous(PDL, EARLY=True)
    if token >= tl.load(num_tokens_ptr):
        return
    sums_GN = tl.zeros((BLOCK_K // VECTOR, BLOCK_N), dtype=tl.float32)
    for start in tl.static_range(0, K * I, BLOCK_K):
        # A vector lies within one expert: I is a multiple of VECTOR.
        at_G = start + tl.arange(0, BLOCK_K // VECTOR) * VECTOR
        at_GV = start + column_GV
        is_there_G = at_G < K * I
        slot_G = tl.minimum(at_G // I, K - 1)
        expert_G = tl.load(ids_ptr + token * K + slot_G)
        weight_G = tl.load(weights_ptr + token * K + slot_G)
        matrix_G = expert_G.to(tl.int64) * D * I - slot_G.to(tl.int64) * I
        pointers = w_ptr + matrix_G[:, None, None] + row_N.to(tl.int64)[None, :, None] * I + at_GV[:, None, :]
        if EVEN:
            w = tl.load(pointers, eviction_policy="evict_first")
            x_GV = tl.load(x_ptr + token * (K * I) + at_GV).to(tl.float32)
        else:
            inside = is_there_G[:, None, None] & inside_N[None, :, None]
            w = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
            x_GV = tl.load(x_ptr + token * (K * I) + at_GV, mask=is_there_G[:, None], other=0.0).to(tl.float32)
        sums_GN += tl.sum(w.to(tl.float32) * x_GV[:, None, :], axis=2) * weight_G[:, None]
    y_N = tl.sum(sums_GN, axis=0)
    out = out_ptr + token * D + row_N
    if ADD:
        y_N += tl.load(out, mask=inside_N, other=0.0).to(tl.float32)
    tl.store(out, y_N.to(out_ptr.dtype.element_ty), mask=inside_N)


def fits(experts: ExpertWeights) -> bool:
    """Whether the experts' rows fall into whole vectors."""
    vector = 16 // experts.down_EDI.element_size()
    return experts.intermediate % vector == 0


def launch_few_gate_up(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor | None,
    eps: float,
    experts: ExpertWeights,
    routing: Routing | None,
    top_k: int,
    kind: str,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    scratch: ExpertScratch,
    bias_E: torch.Tensor | None,
    *,
    block_n: int,
    block_k: int,
    num_warps: int,
) -> None:
    """Activations of every pair, into the scratch; with a routing from the scratch's logits, else for the ids given."""
    weight = experts.gate_up_E2ID
    hidden, width = weight.shape[2], experts.intermediate
    block_k = min(block_k, max(next_power_of_2(hidden), 16))
    few_gate_up_kernel[(cdiv(width, block_n), x_TD.shape[0] * top_k)](
        x_TD,
        weight if norm_D is None else norm_D,
        weight,
        scratch.logits_TE,
        scratch.logits_TE if bias_E is None else bias_E,
        num_tokens,
        ids_TK,
        weights_TK,
        scratch.activated_PI,
        weight.shape[0],
        hidden,
        width,
        eps,
        1.0 if routing is None else routing.scale,
        ROUTES=routing is not None,
        SIGMOID=routing is not None and routing.scoring == "sigmoid",
        HAS_BIAS=bias_E is not None,
        RENORMALIZE=routing is not None and routing.renormalize,
        K=top_k,
        K_BLOCK=next_power_of_2(top_k),
        KIND=KINDS.index(kind),
        BLOCK_E=max(next_power_of_2(weight.shape[0]), 16),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        VECTOR=16 // weight.element_size(),
        EVEN=hidden % block_k == 0 and width % block_n == 0,
        num_warps=num_warps,
        **launch_options(),
    )


def launch_few_down(
    experts: ExpertWeights,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    out_TD: torch.Tensor,
    scratch: ExpertScratch,
    *,
    add: bool,
    block_n: int,
    block_k: int,
    num_warps: int,
) -> None:
    """From the scratch's activations to `out`, or onto it."""
    weight = experts.down_EDI
    hidden, width = weight.shape[1:]
    top_k = ids_TK.shape[1]
    block_k = min(block_k, max(next_power_of_2(top_k * width), 16))
    few_down_kernel[(cdiv(hidden, block_n), out_TD.shape[0])](
        scratch.activated_PI,
        weight,
        num_tokens,
        ids_TK,
        weights_TK,
        out_TD,
        hidden,
        I=width,
        K=top_k,
        ADD=add,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        VECTOR=16 // weight.element_size(),
        EVEN=top_k * width % block_k == 0 and hidden % block_n == 0,
        num_warps=num_warps,
        **launch_options(),
    )
