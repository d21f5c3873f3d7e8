"""Routing on a GPU: from logits to each token's experts, and from those to each expert's list of pairs.

A choice is a chain of steps that wait for one another, so it is cut short: one warp a token takes the largest by comparing
whole numbers, which it can do in one instruction.

A list's order is whatever the programs' race gives; nothing that is computed from it depends on the order, since every row of
a product is a sum by itself. Who reads the lists last clears the counts (`moe_grouped.combine_kernel`).

Legend: T tokens, E experts, K experts a token; a pair is token * K + k.
"""

import torch
import triton

from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.types import ExpertScratch, Routing


@triton.jit
def _sortable(x):
    """Float32 as int32 in the same order, both zeros the same; never the smallest int32."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _unsortable(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def scores(logits_E, SIGMOID: tl.constexpr):
    """Softmax or sigmoid."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits_E))
    else:
        exponentials_E = tl.exp(logits_E - tl.max(logits_E, axis=0))
        return exponentials_E / tl.sum(exponentials_E, axis=0)


@triton.jit
def rank_keys(logits_E, bias_ptr, num_experts, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr):
    """What experts are chosen by: the larger the better, and the smallest int32 where there is none."""
    expert_E = tl.arange(0, logits_E.shape[0])
    is_there_E = expert_E < num_experts
    ranked_E = logits_E
    if HAS_BIAS:
        ranked_E = scores(logits_E, SIGMOID) + tl.load(bias_ptr + expert_E, mask=is_there_E, other=0.0)
    return tl.where(is_there_E, _sortable(ranked_E), -2147483648)


@triton.jit
def take_best(keys_E):
    """(key, expert) of the best that is left, the lower number of equals, and the keys without it."""
    expert_E = tl.arange(0, keys_E.shape[0])
    best = tl.max(keys_E, axis=0)
    expert = tl.min(tl.where(keys_E == best, expert_E, 1 << 30), axis=0)
    return best, expert, tl.where(expert_E == expert, -2147483648, keys_E)


@triton.jit
def _open_groups(
    keys_E,
    num_experts,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
):
    """The keys of the experts of the best groups, as `experts.Routing` says it, and none of the others."""
    expert_E, group_G = tl.arange(0, keys_E.shape[0]), tl.arange(0, GROUPS_BLOCK)
    group_E = expert_E // (num_experts // GROUPS)
    keys_G = tl.full((GROUPS_BLOCK,), -2147483648, dtype=tl.int32)
    for group in tl.static_range(GROUPS):
        best, _, rest_E = take_best(tl.where(group_E == group, keys_E, -2147483648))
        if HAS_BIAS:
            best = _sortable(_unsortable(best) + _unsortable(tl.max(rest_E, axis=0)))
        keys_G = tl.where(group_G == group, best, keys_G)
    open_E = expert_E < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, group, keys_G = take_best(keys_G)
        open_E = open_E | (group_E == group)
    return tl.where(open_E, keys_E, -2147483648)


@triton.jit
def _choose_in_turn(logits_E, num_experts, scale, JITTER: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr):
    """As `choose`, for `sparsemixer`."""
    expert_E, slot_K = tl.arange(0, logits_E.shape[0]), tl.arange(0, K_BLOCK)
    keys_E, left_E = rank_keys(logits_E, logits_E, num_experts, False, False), logits_E
    ids_K = tl.zeros((K_BLOCK,), dtype=tl.int32)
    weights_K = tl.zeros((K_BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        best, expert, keys_E = take_best(keys_E)
        top = _unsortable(best)
        is_far_E = top - logits_E > 2.0 * JITTER * tl.maximum(tl.abs(logits_E), top)
        total = tl.sum(tl.where(is_far_E, 0.0, tl.exp(left_E - top)), axis=0)
        ids_K = tl.where(slot_K == k, tl.minimum(expert, num_experts - 1), ids_K)
        weights_K = tl.where(slot_K == k, scale / total, weights_K)
        left_E = tl.where(expert_E == expert, float("-inf"), left_E)
    return ids_K, weights_K


@triton.jit
def choose(
    logits_E,
    bias_ptr,
    num_experts,
    scale,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr = 1,
    TOP_GROUPS: tl.constexpr = 1,
    GROUPS_BLOCK: tl.constexpr = 1,
):
    """(ids [K_BLOCK], weights [K_BLOCK]) of one token, best first. Logits of no expert are minus infinity."""
    keys_E = rank_keys(logits_E, bias_ptr, num_experts, SIGMOID, HAS_BIAS)
    if TOP_GROUPS < GROUPS:
        keys_E = _open_groups(keys_E, num_experts, HAS_BIAS, GROUPS, TOP_GROUPS, GROUPS_BLOCK)
    expert_E, slot_K = tl.arange(0, logits_E.shape[0]), tl.arange(0, K_BLOCK)
    ids_K = tl.zeros((K_BLOCK,), dtype=tl.int32)
    chosen_K = tl.full((K_BLOCK,), float("-inf"), dtype=tl.float32)
    for k in tl.static_range(K):
        best, expert, keys_E = take_best(keys_E)
        if HAS_BIAS:
            logit = tl.sum(tl.where(expert_E == expert, logits_E, 0.0), axis=0)
        else:
            logit = _unsortable(best)
        ids_K = tl.where(slot_K == k, tl.minimum(expert, num_experts - 1), ids_K)
        chosen_K = tl.where(slot_K == k, logit, chosen_K)
    if SIGMOID:
        weights_K = 1.0 / (1.0 + tl.exp(-chosen_K))
    else:
        largest = tl.max(logits_E, axis=0)
        weights_K = tl.exp(chosen_K - largest)
        if not RENORMALIZE:
            weights_K /= tl.sum(tl.exp(logits_E - largest), axis=0)
    if RENORMALIZE:
        weights_K /= tl.sum(weights_K, axis=0)
    return ids_K, weights_K * scale


@triton.jit
def _append(ids, pair, inside, counts_ptr, lists_ptr, capacity):
    """Each pair to its expert's list."""
    place = tl.atomic_add(counts_ptr + ids, 1, mask=inside, sem="relaxed")
    tl.store(lists_ptr + ids.to(tl.int64) * capacity + place, pair, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "first", "count_here"])
def lists_kernel(
    ids_ptr,
    num_tokens_ptr,
    counts_ptr,
    lists_ptr,
    num_rows,
    capacity,
    first,
    count_here,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each expert's list from ids; only of the `count_here` experts from `first` on, which are counted from there."""
    await_previous(PDL)
    count = tl.minimum(tl.load(num_tokens_ptr).to(tl.int32), num_rows)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < count * K
    here = tl.load(ids_ptr + pair, mask=inside, other=-1) - first
    inside = inside & (here >= 0) & (here < count_here)
    _append(here, pair, inside, counts_ptr, lists_ptr, capacity)


@triton.jit
def choose_kernel(
    logits_ptr,
    bias_ptr,
    num_tokens_ptr,
    ids_ptr,
    weights_ptr,
    counts_ptr,
    lists_ptr,
    num_experts,
    capacity,
    scale,
    LISTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    IN_TURN: tl.constexpr,
    JITTER: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's ids and weights; with LISTS its pairs in the experts' lists too."""
    await_previous(PDL, EARLY=True)
    token = tl.program_id(0)
    if token >= tl.load(num_tokens_ptr):
        return
    expert_E, slot_K = tl.arange(0, BLOCK_E), tl.arange(0, K_BLOCK)
    row = logits_ptr + token.to(tl.int64) * num_experts
    logits_E = tl.load(row + expert_E, mask=expert_E < num_experts, other=float("-inf")).to(tl.float32)
    if IN_TURN:
        ids_K, weights_K = _choose_in_turn(logits_E, num_experts, scale, JITTER, K, K_BLOCK)
    else:
        ids_K, weights_K = choose(
            logits_E,
            bias_ptr,
            num_experts,
            scale,
            SIGMOID,
            HAS_BIAS,
            RENORMALIZE,
            K,
            K_BLOCK,
            GROUPS,
            TOP_GROUPS,
            GROUPS_BLOCK,
        )
    pair_K = token * K + slot_K
    tl.store(ids_ptr + pair_K, ids_K, mask=slot_K < K)
    tl.store(weights_ptr + pair_K, weights_K, mask=slot_K < K)
    if LISTS:
        _append(ids_K, pair_K, slot_K < K, counts_ptr, lists_ptr, capacity)


def launch_lists(
    ids_TK: torch.Tensor, num_tokens: torch.Tensor, scratch: ExpertScratch, first: int, count: int
) -> None:
    """Fill the scratch's lists and counts from ids, for `count` experts from the first on."""
    rows, top_k = ids_TK.shape
    block = 256
    lists_kernel[(cdiv(rows * top_k, block),)](
        ids_TK,
        num_tokens,
        scratch.counts_E,
        scratch.lists_ET,
        rows,
        scratch.capacity,
        first,
        count,
        K=top_k,
        BLOCK=block,
        num_warps=4,
        **launch_options(),
    )


def launch_choose(
    logits_TE: torch.Tensor,
    routing: Routing,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    bias_E: torch.Tensor | None,
    scratch: ExpertScratch | None = None,
) -> None:
    """Ids and weights of every token; the scratch's lists too, if it is given."""
    rows, num_experts = logits_TE.shape
    choose_kernel[(rows,)](
        logits_TE,
        logits_TE if bias_E is None else bias_E,
        num_tokens,
        ids_TK,
        weights_TK,
        ids_TK if scratch is None else scratch.counts_E,
        ids_TK if scratch is None else scratch.lists_ET,
        num_experts,
        0 if scratch is None else scratch.capacity,
        routing.scale,
        LISTS=scratch is not None,
        SIGMOID=routing.scoring == "sigmoid",
        HAS_BIAS=bias_E is not None,
        RENORMALIZE=routing.renormalize,
        IN_TURN=routing.scoring == "sparsemixer",
        JITTER=routing.jitter,
        GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups,
        GROUPS_BLOCK=next_power_of_2(routing.groups),
        K=routing.top_k,
        K_BLOCK=next_power_of_2(routing.top_k),
        BLOCK_E=max(next_power_of_2(num_experts), 32),
        num_warps=1,
        **launch_options(),
    )
