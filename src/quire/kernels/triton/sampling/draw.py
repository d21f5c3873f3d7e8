"""The largest logit of each row, and the Gumbel-max draw: equal to the bit to `kernels/sampling.py`.

The exact noise of a value costs about a hundred instructions, more than reading it. So a first pass goes over the row in
tiles and keeps the largest *approximate* score of each, from fast logarithms whose error is bounded; a second one
computes the exact scores of those few tiles that can hold the winner, without a fused multiply-add anywhere. A greedy row
needs no noise in either.

Legend: S rows, V vocabulary, N tiles a row.
"""

import torch
import triton

from quire.kernels import sampling as definition
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, is_nvidia, launch_options, next_power_of_2, tl
from quire.kernels.triton.sampling.heads import TILE

WARPS = 2
"""Of a first pass; two were faster than four at 256 rows (66 against 74 us, H200) and as fast at one."""

_ROUND_0 = tl.constexpr(0xD2511F53)
_ROUND_1 = tl.constexpr(0xCD9E8D57)
_KEY_0 = tl.constexpr(0x9E3779B9)
_KEY_1 = tl.constexpr(0xBB67AE85)
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
_C = definition.LOG_COEFFICIENTS
_C0, _C1, _C2 = tl.constexpr(_C[0]), tl.constexpr(_C[1]), tl.constexpr(_C[2])
_C3, _C4, _C5 = tl.constexpr(_C[3]), tl.constexpr(_C[4]), tl.constexpr(_C[5])
_C6, _C7, _C8 = tl.constexpr(_C[6]), tl.constexpr(_C[7]), tl.constexpr(_C[8])
_LOG_2_HIGH = tl.constexpr(definition.LOG_2_HIGH)
_LOG_2_LOW = tl.constexpr(definition.LOG_2_LOW)
_LOG_2_E = tl.constexpr(1.4426950408889634)

# The approximate noise is wrong by less than 1e-4: lg2.approx is good to 2^-22, absolutely, and is asked for u only below
# 1 - 1/64, where it makes 2^-16 of its logarithm. Sums and products round to 2^-24 of their size.
_MARGIN = tl.constexpr(1e-3)
_RELATIVE_MARGIN = tl.constexpr(2e-6)


@triton.jit
def philox(c0, position, seed):
    """The four words of Philox4x32-10 for counter (c0, 0, position) and key seed; c0 is uint32, the others int64."""
    zero = c0 * 0
    c1 = zero
    c2 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0 = tl.full((), _KEY_0, tl.uint32)
    w1 = tl.full((), _KEY_1, tl.uint32)
    for _ in tl.static_range(10):
        # One wide multiplication gives both halves.
        product0 = c0.to(tl.uint64) * _ROUND_0
        product1 = c2.to(tl.uint64) * _ROUND_1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _uniform(word):
    """(2 * (word >> 9) + 1) * 2^-24, exactly: 23 bits behind the one of a float, less 1 - 2^-24."""
    return ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _approximate_score(scaled, word, FAST: tl.constexpr):
    """Score of a logit that is scaled by the inverse temperature and log2(e): in units of log(2), less a constant."""
    u = _uniform(word)
    rest = 1.0 - u
    near = rest * (_LOG_2_E + rest * (0.5 * _LOG_2_E + rest * (0.33333334 * _LOG_2_E)))
    exponential = tl.abs(tl.where(rest < 0.015625, near, _log2(u, FAST)))
    return scaled - _log2(exponential, FAST)


@triton.jit
def _log(x):
    """The defined logarithm: every operation rounded by itself. Its kernel is compiled without fused multiply-add."""
    bits = x.to(tl.int32, bitcast=True)
    exponent_bits = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent_bits << 23)).to(tl.float32, bitcast=True) - 1.0
    exponent = exponent_bits.to(tl.float32)
    square = f * f
    p = f * _C0 + _C1
    p = p * f + _C2
    p = p * f + _C3
    p = p * f + _C4
    p = p * f + _C5
    p = p * f + _C6
    p = p * f + _C7
    p = p * f + _C8
    p = p * f * square
    p = p + exponent * _LOG_2_LOW
    p = p - square * 0.5
    return (f + p) + exponent * _LOG_2_HIGH


@triton.jit
def tile_scores_kernel(
    logits_ptr,
    inverse_ptr,
    seed_ptr,
    position_ptr,
    threshold_ptr,
    tile_max_ptr,
    partial_ptr,
    vocabulary,
    num_tiles,
    stride,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """partial[s, n] = the largest (approximate) score of tile n of row s."""
    await_previous(PDL)
    row = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    best = float("-inf")
    threshold = float("-inf")
    is_empty = False
    if FILTERED:
        # The maximum of a tile is known where the row has a threshold, and only there.
        threshold = tl.load(threshold_ptr + row)
        if threshold > float("-inf"):
            is_empty = tl.load(tile_max_ptr + tl.program_id(0)) < threshold
    if not is_empty:
        group = tile * (TILE // 4) + tl.arange(0, TILE // 4)
        at = group[:, None] * 4 + tl.arange(0, 4)[None, :]
        logits = tl.load(logits_ptr + row.to(tl.int64) * stride + at, mask=at < vocabulary, other=float("-inf"))
        logits = logits.to(tl.float32)
        if FILTERED:
            logits = tl.where(logits >= threshold, logits, float("-inf"))
        inverse = float("inf")
        if RANDOM:
            inverse = tl.load(inverse_ptr + row)
        if inverse == float("inf"):
            best = tl.max(tl.max(logits, 1), 0)
        elif RANDOM:
            seed = tl.load(seed_ptr + row).to(tl.int64)
            position = tl.load(position_ptr + row).to(tl.int64)
            w0, w1, w2, w3 = philox(group.to(tl.uint32), position, seed)
            scale = inverse * _LOG_2_E
            even, odd = tl.split(tl.reshape(logits, (TILE // 4, 2, 2)))
            l0, l2 = tl.split(even)
            l1, l3 = tl.split(odd)
            s0 = _approximate_score(l0 * scale, w0, FAST)
            s1 = _approximate_score(l1 * scale, w1, FAST)
            s2 = _approximate_score(l2 * scale, w2, FAST)
            s3 = _approximate_score(l3 * scale, w3, FAST)
            best = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 0)
    tl.store(partial_ptr + tl.program_id(0), best)


@triton.jit
def _exact_best(logits, at, inverse, seed, position, RANDOM: tl.constexpr):
    """(the largest defined score of these values, the first index that has it)."""
    scores = logits
    if RANDOM:  # noqa: SIM102 - this is known when compiling, the next is not
        if inverse != float("inf"):
            w0, w1, w2, w3 = philox((at // 4).to(tl.uint32), position, seed)
            which = at % 4
            word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
            scores = logits * inverse
            scores = scores + (0.0 - _log(0.0 - _log(_uniform(word))))
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, at, 0x7FFFFFFF), 0)


@triton.jit
def pick_kernel(
    logits_ptr,
    inverse_ptr,
    seed_ptr,
    position_ptr,
    threshold_ptr,
    partial_ptr,
    out_ptr,
    vocabulary,
    num_tiles,
    stride,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[s] = the first index with the largest score, from the tiles that can hold it."""
    await_previous(PDL)
    row = tl.program_id(0)
    inverse = float("inf")
    seed = tl.full((), 0, tl.int64)
    position = tl.full((), 0, tl.int64)
    if RANDOM:
        inverse = tl.load(inverse_ptr + row)
        seed = tl.load(seed_ptr + row).to(tl.int64)
        position = tl.load(position_ptr + row).to(tl.int64)
    if FILTERED:
        threshold = tl.load(threshold_ptr + row)
    tiles = tl.arange(0, TILES)
    partial = tl.load(partial_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    top = tl.max(partial, 0)
    is_greedy = inverse == float("inf")
    margin = tl.where(is_greedy, 0.0, _MARGIN + _RELATIVE_MARGIN * tl.abs(top))
    # Where nothing is above minus infinity, no tile is looked at, and the first index is the answer.
    left = (partial >= top - margin) & (partial > float("-inf"))
    best_score = float("-inf")
    best_index = 0
    tile = tl.min(tl.where(left, tiles, TILES), 0)
    while tile < TILES:
        at = tile * TILE + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + row.to(tl.int64) * stride + at, mask=at < vocabulary, other=float("-inf"))
        logits = logits.to(tl.float32)
        if FILTERED:
            logits = tl.where(logits >= threshold, logits, float("-inf"))
        score, index = _exact_best(logits, at, inverse, seed, position, RANDOM)
        if score > best_score:
            best_score = score
            best_index = index
        # The first tile that reaches a greedy row's maximum has the first index.
        left = left & (tiles > tile) & (is_greedy == 0)
        tile = tl.min(tl.where(left, tiles, TILES), 0)
    tl.store(out_ptr + row, best_index)


def launch_draw(
    logits_SV: torch.Tensor,
    inverse_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
    *,
    is_random: bool,
    filtered: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Both passes.

    Args:
        filtered: thresholds [S] below which nothing is drawn (minus infinity where a row has none), and maxima [S, N] of
            the tiles of the rows that have one.
    """
    rows, vocabulary = logits_SV.shape
    if not rows:
        return
    if logits_SV.stride(1) != 1:
        raise ValueError(f"logits must have contiguous rows; their strides are {tuple(logits_SV.stride())}")
    num_tiles = cdiv(vocabulary, TILE)
    partial_SN = torch.empty((rows, num_tiles), dtype=torch.float32, device=logits_SV.device)
    stride = logits_SV.stride(0)
    threshold_S, tile_max_SN = (partial_SN, partial_SN) if filtered is None else filtered
    tile_scores_kernel[(rows * num_tiles,)](
        logits_SV,
        inverse_S,
        seed_S,
        position_S,
        threshold_S,
        tile_max_SN,
        partial_SN,
        vocabulary,
        num_tiles,
        stride,
        RANDOM=is_random,
        FILTERED=filtered is not None,
        TILE=TILE,
        FAST=is_nvidia(),
        num_warps=WARPS,
        **launch_options(),
    )
    pick_kernel[(rows,)](
        logits_SV,
        inverse_S,
        seed_S,
        position_S,
        threshold_S,
        partial_SN,
        out_S,
        vocabulary,
        num_tiles,
        stride,
        RANDOM=is_random,
        FILTERED=filtered is not None,
        TILE=TILE,
        TILES=next_power_of_2(num_tiles),
        num_warps=4,
        enable_fp_fusion=False,
        **launch_options(),
    )


@kernel("argmax", platform="cuda", priority=10)
def argmax(logits_SV: torch.Tensor, out_S: torch.Tensor) -> None:
    """As `ops.argmax`; rows may lie apart."""
    launch_draw(logits_SV, out_S, out_S, out_S, out_S, is_random=False)


@kernel("gumbel_argmax", platform="cuda", priority=10)
def gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    """As `ops.gumbel_argmax`; positions may be int32, and rows may lie apart."""
    launch_draw(logits_SV, inverse_temperature_S, seed_S, position_S, out_S, is_random=True)
