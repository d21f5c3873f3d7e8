"""Routing on a GPU: from hidden states or logits to each token's experts, and from those to each expert's list of pairs.

A list's order is whatever the programs' race gives; nothing that is computed from it depends on the order, since every row of
a product is a sum by itself. Who reads the lists last clears the counts (`moe_grouped.combine_kernel`).

Legend: T tokens, E experts, K experts a token, D hidden; a pair is token * K + k.
"""

import torch
import triton

from quire.kernels.experts import ExpertScratch, Routing
from quire.kernels.triton.launch import cdiv, gdc_launch_dependents, gdc_wait, launch_options, next_power_of_2, tl
from quire.kernels.triton.moe_prefetch import prefetch_rows


@triton.jit
def _scores(logits_TN, logits_TE, SIGMOID: tl.constexpr):
    """Some logits of each row as scores among all of the row's."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits_TN))
    else:
        largest_T = tl.max(logits_TE, axis=1)
        return tl.exp(logits_TN - largest_T[:, None]) / tl.sum(tl.exp(logits_TE - largest_T[:, None]), axis=1)[:, None]


@triton.jit
def _choose(
    logits_TE,
    bias_ptr,
    num_experts,
    scale,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """(ids [T, K_BLOCK], weights [T, K_BLOCK]): the K best of each row, best first, the lower number of equals."""
    T: tl.constexpr = logits_TE.shape[0]
    E: tl.constexpr = logits_TE.shape[1]
    expert_E = tl.arange(0, E)
    logits_TE = tl.where((expert_E < num_experts)[None, :], logits_TE, float("-inf"))
    ranked_TE = logits_TE
    if HAS_BIAS:
        scores_TE = _scores(logits_TE, logits_TE, SIGMOID)
        ranked_TE = scores_TE + tl.load(bias_ptr + expert_E, mask=expert_E < num_experts, other=float("-inf"))[None, :]
    slot_K = tl.arange(0, K_BLOCK)
    ids_TK = tl.zeros((T, K_BLOCK), dtype=tl.int32)
    weights_TK = tl.full((T, K_BLOCK), float("-inf"), dtype=tl.float32)
    for k in tl.static_range(K):
        best_T, id_T = tl.max(ranked_TE, axis=1, return_indices=True, return_indices_tie_break_left=True)
        is_best_TE = expert_E[None, :] == id_T[:, None]
        if HAS_BIAS:
            best_T = tl.sum(tl.where(is_best_TE, scores_TE, 0.0), axis=1)
        ids_TK = tl.where(slot_K[None, :] == k, tl.minimum(id_T, num_experts - 1)[:, None], ids_TK)
        weights_TK = tl.where(slot_K[None, :] == k, best_T[:, None], weights_TK)
        ranked_TE = tl.where(is_best_TE, float("-inf"), ranked_TE)
    if not HAS_BIAS:
        weights_TK = _scores(weights_TK, logits_TE, SIGMOID)
    weights_TK = tl.where(slot_K[None, :] < K, weights_TK, 0.0)
    if RENORMALIZE:
        weights_TK /= tl.sum(weights_TK, axis=1)[:, None]
    return ids_TK, weights_TK * scale


@triton.jit
def _append(ids_TK, pair_TK, inside_TK, counts_ptr, lists_ptr, capacity):
    """Each pair to its expert's list."""
    place_TK = tl.atomic_add(counts_ptr + ids_TK, 1, mask=inside_TK, sem="relaxed")
    tl.store(lists_ptr + ids_TK.to(tl.int64) * capacity + place_TK, pair_TK, mask=inside_TK)


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    logits_ptr,
    bias_ptr,
    num_tokens_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    num_experts,
    scale,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids and weights from logits."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.minimum(tl.load(num_tokens_ptr).to(tl.int32), num_rows)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E, slot_K = tl.arange(0, BLOCK_E), tl.arange(0, K_BLOCK)
    at_TE = token_T.to(tl.int64)[:, None] * num_experts + expert_E[None, :]
    is_there_TE = (token_T < count)[:, None] & (expert_E < num_experts)[None, :]
    logits_TE = tl.load(logits_ptr + at_TE, mask=is_there_TE, other=0.0).to(tl.float32)
    ids_TK, weights_TK = _choose(logits_TE, bias_ptr, num_experts, scale, SIGMOID, HAS_BIAS, RENORMALIZE, K, K_BLOCK)
    pair_TK = token_T[:, None] * K + slot_K[None, :]
    inside_TK = (token_T < count)[:, None] & (slot_K < K)[None, :]
    tl.store(ids_ptr + pair_TK, ids_TK, mask=inside_TK)
    tl.store(weights_ptr + pair_TK, weights_TK, mask=inside_TK)


@triton.jit(do_not_specialize=["num_rows"])
def lists_kernel(
    ids_ptr,
    num_tokens_ptr,
    counts_ptr,
    lists_ptr,
    num_rows,
    capacity,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each expert's list from ids."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.minimum(tl.load(num_tokens_ptr).to(tl.int32), num_rows)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < count * K
    _append(tl.load(ids_ptr + pair, mask=inside, other=0), pair, inside, counts_ptr, lists_ptr, capacity)


@triton.jit(do_not_specialize=["num_rows"])
def router_kernel(
    x_ptr,
    norm_ptr,
    router_ptr,
    bias_ptr,
    num_tokens_ptr,
    normed_ptr,
    logits_ptr,
    arrived_ptr,
    ids_ptr,
    weights_ptr,
    counts_ptr,
    lists_ptr,
    num_rows,
    num_experts,
    D,
    capacity,
    eps,
    scale,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PRESCALE: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """normed = rms_norm(x), logits = normed @ router.T, then ids, weights and lists. SPLIT programs share a block of tokens:
    each has its part of the experts and of normed's columns, and the last to finish chooses. The norm divides the result, which
    a row's sum is known for by then; PRESCALE: the input, for types whose range the input would leave."""
    part = tl.program_id(1)
    E: tl.constexpr = BLOCK_E // SPLIT
    expert_E = part * E + tl.arange(0, E)
    router_rows = router_ptr + tl.minimum(expert_E, num_experts - 1).to(tl.int64)[:, None] * D
    if PDL:
        gdc_launch_dependents()
        if PIECES > 0:
            prefetch_rows(router_rows, D // PIECES, PIECES)
        gdc_wait()
    count = tl.minimum(tl.load(num_tokens_ptr).to(tl.int32), num_rows)
    first = tl.program_id(0) * BLOCK_T
    if first >= count:
        return
    token_T = first + tl.arange(0, BLOCK_T)
    is_token_T = token_T < count
    x_rows = x_ptr + tl.minimum(token_T, count - 1).to(tl.int64)[:, None] * D
    column_D = tl.arange(0, BLOCK_D)
    if PRESCALE:
        squares_TD = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            at_D = start + column_D
            x_TD = tl.load(x_rows + at_D[None, :], mask=(at_D < D)[None, :], other=0.0).to(tl.float32)
            squares_TD += x_TD * x_TD
        inverse_T = tl.rsqrt(tl.sum(squares_TD, axis=1) / D + eps)
    squares_TD = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    logits_TE = tl.zeros((BLOCK_T, E), dtype=tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        at_D = start + column_D
        inside_D = at_D < D
        x_TD = tl.load(x_rows + at_D[None, :], mask=inside_D[None, :], other=0.0).to(tl.float32)
        router_ED = tl.load(router_rows + at_D[None, :], mask=inside_D[None, :], other=0.0)
        x_norm_TD = x_TD * tl.load(norm_ptr + at_D, mask=inside_D, other=0.0)[None, :]
        if PRESCALE:
            x_norm_TD *= inverse_T[:, None]
        else:
            squares_TD += x_TD * x_TD
        logits_TE = tl.dot(x_norm_TD.to(router_ED.dtype), tl.trans(router_ED), logits_TE, input_precision="ieee")
    if not PRESCALE:
        inverse_T = tl.rsqrt(tl.sum(squares_TD, axis=1) / D + eps)
        logits_TE *= inverse_T[:, None]
    for start in range(part * BLOCK_D, D, SPLIT * BLOCK_D):
        at_D = start + column_D
        inside_D = at_D < D
        x_TD = tl.load(x_rows + at_D[None, :], mask=inside_D[None, :], other=0.0).to(tl.float32)
        normed_TD = x_TD * inverse_T[:, None] * tl.load(norm_ptr + at_D, mask=inside_D, other=0.0)[None, :]
        out = normed_ptr + token_T.to(tl.int64)[:, None] * D + at_D[None, :]
        tl.store(out, normed_TD.to(normed_ptr.dtype.element_ty), mask=is_token_T[:, None] & inside_D[None, :])
    if SPLIT == 1:
        _finish(
            logits_TE, token_T, is_token_T, bias_ptr, ids_ptr, weights_ptr, counts_ptr, lists_ptr, num_experts, capacity,
            scale, SIGMOID, HAS_BIAS, RENORMALIZE, K, K_BLOCK,
        )  # fmt: skip
    else:
        rows = logits_ptr + token_T.to(tl.int64)[:, None] * num_experts
        is_mine_TE = is_token_T[:, None] & (expert_E < num_experts)[None, :]
        tl.store(rows + expert_E[None, :], logits_TE, mask=is_mine_TE)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            tl.store(arrived_ptr + tl.program_id(0), 0)
            all_E = tl.arange(0, BLOCK_E)
            is_there_TE = is_token_T[:, None] & (all_E < num_experts)[None, :]
            all_TE = tl.load(rows + all_E[None, :], mask=is_there_TE, other=0.0, cache_modifier=".cg")
            _finish(
                all_TE, token_T, is_token_T, bias_ptr, ids_ptr, weights_ptr, counts_ptr, lists_ptr, num_experts,
                capacity, scale, SIGMOID, HAS_BIAS, RENORMALIZE, K, K_BLOCK,
            )  # fmt: skip


@triton.jit
def _finish(
    logits_TE,
    token_T,
    is_token_T,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    counts_ptr,
    lists_ptr,
    num_experts,
    capacity,
    scale,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """Choose, write down, append."""
    ids_TK, weights_TK = _choose(logits_TE, bias_ptr, num_experts, scale, SIGMOID, HAS_BIAS, RENORMALIZE, K, K_BLOCK)
    slot_K = tl.arange(0, K_BLOCK)
    pair_TK = token_T[:, None] * K + slot_K[None, :]
    inside_TK = is_token_T[:, None] & (slot_K < K)[None, :]
    tl.store(ids_ptr + pair_TK, ids_TK, mask=inside_TK)
    tl.store(weights_ptr + pair_TK, weights_TK, mask=inside_TK)
    _append(ids_TK, pair_TK, inside_TK, counts_ptr, lists_ptr, capacity)


def _constants(routing: Routing, bias_E: torch.Tensor | None) -> dict[str, int | bool]:
    return {
        "SIGMOID": routing.scoring == "sigmoid",
        "HAS_BIAS": bias_E is not None,
        "RENORMALIZE": routing.renormalize,
        "K": routing.top_k,
        "K_BLOCK": next_power_of_2(routing.top_k),
    }


def launch_route(
    logits_TE: torch.Tensor,
    routing: Routing,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    bias_E: torch.Tensor | None,
) -> None:
    """As `ops.moe_route`, for one group."""
    rows, num_experts = logits_TE.shape
    block_t = 4
    route_kernel[(cdiv(rows, block_t),)](
        logits_TE,
        logits_TE if bias_E is None else bias_E,
        num_tokens,
        ids_TK,
        weights_TK,
        rows,
        num_experts,
        routing.scale,
        **_constants(routing, bias_E),
        BLOCK_T=block_t,
        BLOCK_E=max(next_power_of_2(num_experts), 16),
        num_warps=4,
        **launch_options(),
    )


def launch_lists(ids_TK: torch.Tensor, num_tokens: torch.Tensor, scratch: ExpertScratch) -> None:
    """Fill the scratch's lists and counts from ids."""
    rows, top_k = ids_TK.shape
    block = 256
    lists_kernel[(cdiv(rows * top_k, block),)](
        ids_TK, num_tokens, scratch.counts_E, scratch.lists_ET, rows, scratch.capacity, K=top_k, BLOCK=block,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def launch_router(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    router_ED: torch.Tensor,
    routing: Routing,
    num_tokens: torch.Tensor,
    normed_TD: torch.Tensor,
    scratch: ExpertScratch,
    bias_E: torch.Tensor | None,
    *,
    block_t: int,
    block_d: int,
    split: int,
    stages: int,
    num_warps: int,
) -> None:
    """Norm, logits, choice and lists in one launch."""
    rows, hidden = x_TD.shape
    block_e = max(next_power_of_2(routing.num_experts), 16)
    pieces = max(num_warps * 32 * split // block_e, 1)
    router_kernel[(cdiv(rows, block_t), split)](
        x_TD,
        norm_D,
        router_ED,
        norm_D if bias_E is None else bias_E,
        num_tokens,
        normed_TD,
        scratch.logits_TE,
        scratch.arrived,
        scratch.ids_TK,
        scratch.weights_TK,
        scratch.counts_E,
        scratch.lists_ET,
        rows,
        routing.num_experts,
        hidden,
        scratch.capacity,
        eps,
        routing.scale,
        **_constants(routing, bias_E),
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_D=block_d,
        SPLIT=split,
        STAGES=stages,
        PRESCALE=torch.float16 in (x_TD.dtype, router_ED.dtype),
        PIECES=pieces if hidden * router_ED.element_size() % (16 * pieces) == 0 else 0,
        num_warps=num_warps,
        **launch_options(),
    )
