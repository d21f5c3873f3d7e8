"""Choosing tokens: argmax and Gumbel-max draws, what changes single logits before them, filters, and logprobs.

Top-k, top-p and min-p each keep a head of the descending order, so together they are a single cut: tokens whose logit is at
least the threshold may be sampled. Ties at the cut are kept whole, which makes the result independent of how equal logits are
ordered. The order of filters is min-p, then top-k, then top-p over what is left, each on the distribution after temperature.

The noise is defined to the bit, so that a token depends on (seed, position) and logits only, on every device:

1. Philox4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"): key = (low, high 32 bits of seed),
   counter = (index // 4, 0, low, high 32 bits of position); the word is output number index % 4.
2. u = (2 * (word >> 9) + 1) * 2**-24: exact in float32, in the open interval (0, 1), 24 significant bits.
3. noise = -log(-log(u)), where log is `log_float32` below: float32, every multiplication and addition rounded by itself
   (no fused multiply-add), so that hardware and libraries cannot differ.
4. score = logits * inverse_temperature + noise, again two roundings; the first largest score wins.

Legend: S rows, V vocabulary, X slots of a table, C seen tokens a slot, E edits a slot, W words of 32 tokens, N rows whose
logprobs are wanted, K tokens of each.
"""

import torch
from torch import Tensor

from quire.kernels.registry import operation, reference


@operation
def penalize(
    logits_SV: Tensor,
    slots_S: Tensor,
    repetition_S: Tensor,
    frequency_S: Tensor,
    presence_S: Tensor,
    seen_ids_XC: Tensor,
    seen_counts_XC: Tensor,
    seen_sizes_X: Tensor,
    longest: int,
) -> None:
    """Penalise the tokens that a row has seen, in place, as `sample/penalties.py` says. A row's slot (int32, -1 for none)
    names its distinct tokens and how often each was generated in the seen table (int32); no slot of these rows holds more
    than `longest` tokens."""
    rows = torch.arange(len(slots_S), device=logits_SV.device)
    slots = slots_S.long().clamp(min=0)
    ids_SC, counts_SC = seen_ids_XC[slots, :longest], seen_counts_XC[slots, :longest].float()
    place_C = torch.arange(ids_SC.shape[1], device=logits_SV.device)
    is_seen_SC = (place_C < seen_sizes_X[slots][:, None]) & (slots_S >= 0)[:, None]
    ids_SC = torch.where(is_seen_SC, ids_SC, 0).long()
    values_SC = logits_SV[rows[:, None], ids_SC]
    subtract_SC = frequency_S[:, None] * counts_SC + presence_S[:, None] * (counts_SC > 0)
    factor_SC = repetition_S[:, None]
    penalised_SC = torch.where(values_SC > 0, values_SC / factor_SC, values_SC * factor_SC) - subtract_SC
    where = is_seen_SC.nonzero(as_tuple=True)
    logits_SV[where[0], ids_SC[where]] = penalised_SC[where]


@operation
def count_tokens(
    token_ids_S: Tensor,
    slots_S: Tensor,
    seen_ids_XC: Tensor,
    seen_counts_XC: Tensor,
    seen_sizes_X: Tensor,
) -> None:
    """Count each row's new token in its slot (-1 for none) of the seen table, which has room for it."""
    for token, slot in zip(token_ids_S.tolist(), slots_S.tolist(), strict=True):
        if slot < 0:
            continue
        size = int(seen_sizes_X[slot])
        found = (seen_ids_XC[slot, :size] == token).nonzero()
        place = int(found[0]) if len(found) else size
        if place == size:
            seen_ids_XC[slot, place], seen_counts_XC[slot, place] = token, 0
            seen_sizes_X[slot] += 1
        seen_counts_XC[slot, place] += 1


@operation
def edit_logits(
    logits_SV: Tensor,
    slots_S: Tensor,
    positions_S: Tensor,
    edit_ids_XE: Tensor,
    edit_values_XE: Tensor,
    edit_until_XE: Tensor,
) -> None:
    """The edits of each row's slot (int32, -1 for none), in place: to the logit of every id (-1: no edit) its float32 value
    is added; while the row's position is below `until` it is hidden instead. The ids of a slot are distinct."""
    slots = slots_S.long().clamp(min=0)
    ids_SE = edit_ids_XE[slots].long()
    is_edit_SE = (ids_SE >= 0) & (slots_S >= 0)[:, None]
    rows, places = is_edit_SE.nonzero(as_tuple=True)
    ids = ids_SE[rows, places]
    is_hidden = positions_S[rows] < edit_until_XE[slots[rows], places]
    edited = logits_SV[rows, ids] + edit_values_XE[slots[rows], places]
    logits_SV[rows, ids] = torch.where(is_hidden, -torch.inf, edited)


@operation
def keep_allowed(logits_SV: Tensor, slots_S: Tensor, allowed_XW: Tensor) -> None:
    """Hide what the row's slot (int32, -1 for none) does not allow: token t is bit t % 32 of int32 word t // 32."""
    token_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    words_SV = allowed_XW[slots_S.long().clamp(min=0)][:, token_V // 32]
    is_allowed_SV = ((words_SV >> (token_V % 32)) & 1).bool() | (slots_S < 0)[:, None]
    logits_SV.masked_fill_(~is_allowed_SV, -torch.inf)


@operation
def argmax(logits_SV: Tensor, out_S: Tensor) -> None:
    """Index of each row's largest value (the first of equals) as int32."""
    out_S.copy_(logits_SV.argmax(-1))


_MASK = 0xFFFFFFFF
_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1): f - f^2 / 2 + f^3 * P(f); minimax coefficients of Moshier's Cephes.
LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LOG_2_HIGH, LOG_2_LOW = 0.693359375, -2.12194440e-4
_SQRT_HALF_BITS = 0x3F3504F3


def philox(seed_S: Tensor, position_S: Tensor, count: int) -> Tensor:
    """The first `count` 32-bit words of each (seed, position), as int64 [S, count]."""
    blocks = torch.arange((count + 3) // 4, device=seed_S.device, dtype=torch.int64)
    seed, position = seed_S.long()[:, None], position_S.long()[:, None]
    c0 = blocks[None, :].expand(seed.shape[0], -1)
    c1 = torch.zeros_like(c0)
    c2, c3 = (position & _MASK).expand_as(c0), ((position >> 32) & _MASK).expand_as(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        # The 64-bit products wrap into the sign bit; the mask after the shift takes the same bits either way.
        product0, product1 = c0 * _ROUND_MULTIPLIERS[0], c2 * _ROUND_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :count]


def log_float32(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float32 numbers, with a defined rounding at every operation."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    exponent = exponent.float()
    square = f * f
    p = torch.full_like(f, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        p = p * f
        p = p + coefficient
    p = p * f
    p = p * square
    p = p + exponent * LOG_2_LOW
    p = p - square * 0.5
    result = f + p
    return result + exponent * LOG_2_HIGH


def gumbel_noise(seed_S: Tensor, position_S: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise, float32 [S, count], as the module's docstring defines it."""
    words = philox(seed_S, position_S, count)
    u = ((words >> 9) * 2 + 1).float() * 2.0**-24
    return -log_float32(-log_float32(u))


@operation
def allowed_gumbel_argmax(
    logits_SV: Tensor,
    slots_S: Tensor,
    allowed_XW: Tensor,
    inverse_temperature_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    out_S: Tensor,
) -> None:
    """`keep_allowed`, then `gumbel_argmax`."""
    reference(keep_allowed)(logits_SV, slots_S, allowed_XW)
    reference(gumbel_argmax)(logits_SV, inverse_temperature_S, seed_S, position_S, out_S)


@operation
def gumbel_argmax(
    logits_SV: Tensor,
    inverse_temperature_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    out_S: Tensor,
) -> None:
    """Draw from softmax(logits * inverse_temperature): the largest of scaled logits plus Gumbel noise, as int32.

    The noise is a function of (seed, position, vocabulary index) alone, equal to the bit on every device; its definition
    is this module's docstring. inverse_temperature is float32 > 0; infinity means greedy.
    seed and position are int64. Logits of minus infinity are never drawn. logits stay as they are."""
    logits = logits_SV.float()
    greedy = torch.isinf(inverse_temperature_S)
    inverse = torch.where(greedy, torch.ones_like(inverse_temperature_S), inverse_temperature_S).float()
    scores = logits * inverse[:, None]
    scores = scores + gumbel_noise(seed_S, position_S, logits.shape[1])
    out_S.copy_(torch.where(greedy[:, None], logits, scores).argmax(-1))


def compute_thresholds(
    logits_SV: Tensor, inverse_temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor
) -> Tensor:
    """The smallest logit of each row that may be drawn, float32 [S]; minus infinity for greedy and unfiltered rows."""
    vocabulary = logits_SV.shape[1]
    sorted_SV = logits_SV.double().sort(-1, descending=True).values
    inverse_S1 = inverse_temperature_S.double()[:, None]
    largest_S1 = sorted_SV[:, :1]
    floor_S1 = largest_S1 + min_p_S.double()[:, None].log() / inverse_S1
    limit_S1 = torch.where((top_k_S > 0) & (top_k_S < vocabulary), top_k_S, vocabulary).long()[:, None]
    threshold_S1 = torch.maximum(floor_S1, sorted_SV.gather(1, limit_S1 - 1))
    threshold_S1 = torch.where(limit_S1 < vocabulary, threshold_S1, floor_S1)
    rank_V = torch.arange(vocabulary, device=logits_SV.device)
    weights_SV = torch.exp((sorted_SV - largest_S1) * inverse_S1)
    weights_SV = torch.where((rank_V < limit_S1) & (sorted_SV >= threshold_S1), weights_SV, 0.0)
    mass_SV = weights_SV.cumsum(-1)
    below_S1 = (mass_SV < top_p_S.double()[:, None] * mass_SV[:, -1:]).sum(-1, keepdim=True)
    cut_S1 = sorted_SV.gather(1, below_S1.clamp(max=vocabulary - 1))
    threshold_S1 = torch.where(top_p_S[:, None] < 1, torch.maximum(threshold_S1, cut_S1), threshold_S1)
    return torch.where(torch.isinf(inverse_S1), -torch.inf, threshold_S1)[:, 0].float()


@operation
def hide_below(logits_SV: Tensor, threshold_S: Tensor) -> None:
    """Logits under their row's threshold become minus infinity, in place."""
    logits_SV.masked_fill_(logits_SV < threshold_S[:, None], -torch.inf)


@operation
def filtered_gumbel_argmax(
    logits_SV: Tensor,
    inverse_temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    threshold_S: Tensor,
    out_S: Tensor,
) -> None:
    """As `gumbel_argmax`, over what min-p, top-k (int32, 0 is off) and top-p (1 is off) leave; float32 logits stay as they
    are. The smallest logit that could be drawn is left in float32 threshold_S: minus infinity where a row drops nothing.
    What the filters mean, and their order, is in this module's docstring."""
    threshold_S.copy_(compute_thresholds(logits_SV, inverse_temperature_S, top_k_S, top_p_S, min_p_S))
    left_SV = logits_SV.clone()
    reference(hide_below)(left_SV, threshold_S)
    reference(gumbel_argmax)(left_SV, inverse_temperature_S, seed_S, position_S, out_S)


@operation
def token_logprobs(
    logits_SV: Tensor,
    index_N: Tensor,
    token_ids_N: Tensor,
    normalize: bool,
    values_NK: Tensor,
    ids_NK: Tensor,
    ranks_N: Tensor,
) -> None:
    """For each n, of the float32 logits of row index[n]: first token_ids[n], then the K - 1 most likely tokens (the lower id
    first among equals; at most 64, and no more than there are). Values are log probabilities, or the logits themselves
    where `normalize` is False; ranks are the tokens' own, from 1. Everything else is int32."""
    logits_NV = logits_SV[index_N.long()]
    own_N1 = token_ids_N.long()[:, None]
    own_value_N1 = logits_NV.gather(1, own_N1)
    ranks_N.copy_((logits_NV > own_value_N1).sum(-1) + 1)
    # A stable sort: of equal logits the lower id comes first.
    values_NV, order_NV = torch.sort(logits_NV, dim=-1, descending=True, stable=True)
    count = values_NK.shape[1] - 1
    total_N1 = torch.logsumexp(logits_NV, dim=-1, keepdim=True) if normalize else 0.0
    values_NK.copy_(torch.cat((own_value_N1, values_NV[:, :count]), 1) - total_N1)
    ids_NK.copy_(torch.cat((own_N1, order_NV[:, :count]), 1))
