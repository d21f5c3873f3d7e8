"""Routing on a GPU: from hidden states or logits to each token's experts, and from those to each expert's list of pairs.

A choice is a chain of steps that wait for one another, so it is cut short: logits come from many small programs at once, then
one warp a token takes the largest by comparing whole numbers, which it can do in one instruction.

A list's order is whatever the programs' race gives; nothing that is computed from it depends on the order, since every row of
a product is a sum by itself. Who reads the lists last clears the counts (`moe_grouped.combine_kernel`).

Legend: T tokens, E experts, K experts a token, D hidden; a pair is token * K + k.
"""

import torch
import triton

from quire.kernels.experts import ExpertScratch, Routing
from quire.kernels.triton.launch import cdiv, gdc_launch_dependents, gdc_wait, launch_options, next_power_of_2, tl


@triton.jit
def _sortable(x):
    """Float32 as int32 in the same order; its own inverse, and never the smallest int32."""
    bits = x.to(tl.int32, bitcast=True)
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
):
    """(ids [K_BLOCK], weights [K_BLOCK]) of one token, best first. Logits of no expert are minus infinity."""
    keys_E = rank_keys(logits_E, bias_ptr, num_experts, SIGMOID, HAS_BIAS)
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
def logits_kernel(
    x_ptr,
    norm_ptr,
    router_ptr,
    num_tokens_ptr,
    logits_ptr,
    squares_ptr,
    num_rows,
    num_experts,
    D,
    WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits[part] [T, E] = (x * norm) @ router.T over the part's columns, squares[part] [T] = the sum of x's squares there:
    what the norm divides by is known only when the parts are added. ONCE: a part is one block of columns. WIDE: the product
    is in float32, for types whose range x * norm would leave."""
    first_T, block_e, part = tl.program_id(0) * BLOCK_T, tl.program_id(1), tl.program_id(2)
    expert_E = block_e * BLOCK_E + tl.arange(0, BLOCK_E)
    column_D = tl.arange(0, BLOCK_D)
    router_rows = router_ptr + tl.minimum(expert_E, num_experts - 1).to(tl.int64)[:, None] * D
    length = tl.cdiv(tl.cdiv(D, BLOCK_D), PARTS) * BLOCK_D
    first_D = part * length
    last_D = tl.minimum(first_D + length, D)
    if ONCE:
        router_ED = tl.load(router_rows + (first_D + column_D)[None, :])
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if first_T >= tl.load(num_tokens_ptr):
        return
    token_T = first_T + tl.arange(0, BLOCK_T)
    x_rows = x_ptr + tl.minimum(token_T, num_rows - 1).to(tl.int64)[:, None] * D
    squares_TD = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    logits_TE = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for start in range(first_D, last_D, BLOCK_D):
        at_D = start + column_D
        inside_D = at_D < D
        x_TD = tl.load(x_rows + at_D[None, :], mask=inside_D[None, :], other=0.0).to(tl.float32)
        if not ONCE:
            router_ED = tl.load(router_rows + at_D[None, :], mask=inside_D[None, :], other=0.0)
        squares_TD += x_TD * x_TD
        x_TD *= tl.load(norm_ptr + at_D, mask=inside_D, other=0.0)[None, :]
        if WIDE:
            logits_TE = tl.dot(x_TD, tl.trans(router_ED.to(tl.float32)), logits_TE, input_precision="ieee")
        else:
            logits_TE = tl.dot(x_TD.to(router_ED.dtype), tl.trans(router_ED), logits_TE, input_precision="ieee")
    row_T = part * num_rows + token_T
    inside_T = token_T < num_rows
    out = logits_ptr + row_T.to(tl.int64)[:, None] * num_experts + expert_E[None, :]
    tl.store(out, logits_TE, mask=inside_T[:, None] & (expert_E < num_experts)[None, :])
    if block_e == 0:
        tl.store(squares_ptr + row_T, tl.sum(squares_TD, axis=1), mask=inside_T)


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    logits_ptr,
    squares_ptr,
    x_ptr,
    norm_ptr,
    bias_ptr,
    num_tokens_ptr,
    normed_ptr,
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
    PARTS: tl.constexpr,
    NORMED: tl.constexpr,
    LISTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: its parts of logits added, ids and weights, with LISTS its pairs in the experts' lists. NORMED: parts are as
    `logits_kernel` leaves them, and normed = rms_norm(x) is written too."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    if token >= tl.load(num_tokens_ptr):
        return
    expert_E, slot_K = tl.arange(0, BLOCK_E), tl.arange(0, K_BLOCK)
    is_there_E = expert_E < num_experts
    logits_E = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        row = (part * num_rows + token).to(tl.int64) * num_experts
        logits_E += tl.load(logits_ptr + row + expert_E, mask=is_there_E, other=0.0).to(tl.float32)
    if NORMED:
        squares = 0.0
        for part in tl.static_range(PARTS):
            squares += tl.load(squares_ptr + part * num_rows + token)
        inverse = tl.rsqrt(squares / D + eps)
        logits_E *= inverse
    logits_E = tl.where(is_there_E, logits_E, float("-inf"))
    ids_K, weights_K = choose(logits_E, bias_ptr, num_experts, scale, SIGMOID, HAS_BIAS, RENORMALIZE, K, K_BLOCK)
    pair_K = token * K + slot_K
    tl.store(ids_ptr + pair_K, ids_K, mask=slot_K < K)
    tl.store(weights_ptr + pair_K, weights_K, mask=slot_K < K)
    if LISTS:
        _append(ids_K, pair_K, slot_K < K, counts_ptr, lists_ptr, capacity)
    if NORMED:
        for start in range(0, D, BLOCK_D):
            at_D = start + tl.arange(0, BLOCK_D)
            inside_D = at_D < D
            row_D = token.to(tl.int64) * D + at_D
            x_D = tl.load(x_ptr + row_D, mask=inside_D, other=0.0).to(tl.float32)
            x_D *= inverse * tl.load(norm_ptr + at_D, mask=inside_D, other=0.0)
            tl.store(normed_ptr + row_D, x_D.to(normed_ptr.dtype.element_ty), mask=inside_D)


def launch_lists(ids_TK: torch.Tensor, num_tokens: torch.Tensor, scratch: ExpertScratch) -> None:
    """Fill the scratch's lists and counts from ids."""
    rows, top_k = ids_TK.shape
    block = 256
    lists_kernel[(cdiv(rows * top_k, block),)](
        ids_TK, num_tokens, scratch.counts_E, scratch.lists_ET, rows, scratch.capacity, K=top_k, BLOCK=block,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def launch_logits(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    router_ED: torch.Tensor,
    num_tokens: torch.Tensor,
    scratch: ExpertScratch,
    *,
    parts: int,
    block_t: int,
    block_e: int,
    num_warps: int,
) -> None:
    """Parts of logits and of squares, for `launch_choose` to add up."""
    rows, hidden = x_TD.shape
    num_experts = router_ED.shape[0]
    block_d = min(next_power_of_2(cdiv(hidden, parts)), 512)
    logits_kernel[(cdiv(rows, block_t), cdiv(num_experts, block_e), parts)](
        x_TD,
        norm_D,
        router_ED,
        num_tokens,
        scratch.logits_TE,
        scratch.squares_T,
        rows,
        num_experts,
        hidden,
        WIDE=torch.float16 in (x_TD.dtype, router_ED.dtype),
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_D=block_d,
        PARTS=parts,
        ONCE=hidden == block_d * parts,
        num_warps=num_warps,
        **launch_options(),
    )


def launch_choose(
    logits_TE: torch.Tensor,
    routing: Routing,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    bias_E: torch.Tensor | None,
    *,
    scratch: ExpertScratch | None = None,
    parts: int = 1,
    x_TD: torch.Tensor | None = None,
    norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    normed_TD: torch.Tensor | None = None,
) -> None:
    """Ids and weights of every token.

    Args:
        logits_TE: whole ones, or with `x_TD` the parts that `launch_logits` left.
        scratch: its lists are filled too, if it is given.
        x_TD: is normed into normed_TD, by norm_D and eps.
    """
    rows, num_experts = ids_TK.shape[0], routing.num_experts
    hidden = 1 if x_TD is None else x_TD.shape[1]
    choose_kernel[(rows,)](
        logits_TE,
        logits_TE if scratch is None else scratch.squares_T,
        logits_TE if x_TD is None else x_TD,
        logits_TE if norm_D is None else norm_D,
        logits_TE if bias_E is None else bias_E,
        num_tokens,
        logits_TE if normed_TD is None else normed_TD,
        ids_TK,
        weights_TK,
        ids_TK if scratch is None else scratch.counts_E,
        ids_TK if scratch is None else scratch.lists_ET,
        rows,
        num_experts,
        hidden,
        0 if scratch is None else scratch.capacity,
        eps,
        routing.scale,
        PARTS=parts,
        NORMED=x_TD is not None,
        LISTS=scratch is not None,
        SIGMOID=routing.scoring == "sigmoid",
        HAS_BIAS=bias_E is not None,
        RENORMALIZE=routing.renormalize,
        K=routing.top_k,
        K_BLOCK=next_power_of_2(routing.top_k),
        BLOCK_E=max(next_power_of_2(num_experts), 32),
        BLOCK_D=min(next_power_of_2(hidden), 2048),
        num_warps=1,
        **launch_options(),
    )
