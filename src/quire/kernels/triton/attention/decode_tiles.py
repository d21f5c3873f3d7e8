"""What the decode kernel does with one tile of keys, and with the parts that several programs leave of a head.

Legend: M rows of a query tile, padded for the matrix units; L keys of a tile, R rows of a part, H head size, I parts of a head.
"""

import triton
import triton.language as tl

from quire.kernels.triton.attention.rope import PORTABLE

LOG2E = tl.constexpr(1.4426950408889634)
FP8_TO_FP16 = tl.constexpr(256.0)
"""What float8 e4m3 has lost when its bits are read as float16's."""


@triton.jit
def load_pages(address_L):
    """Page ids. Hidden from the compiler's pipeline, which would halve the tiles in flight for the sake of a cached load."""
    if PORTABLE:
        return tl.load(address_L)
    return tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [address_L], tl.int32, is_pure=True, pack=1)


@triton.jit
def softmax_step(
    scores_ML,
    position_L,
    is_seen_ML,
    query_position_M,
    peak_M,
    sum_M,
    slope_M,
    scale,
    soft_cap,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """One more tile of the online softmax, in base 2. Gives the tile's weights, and by what the sums so far shrink."""
    if HAS_CAP:
        scores_ML = soft_cap * (1 - 2 / (1 + tl.exp2(scores_ML * (2 * LOG2E * scale / soft_cap))))
        scores_ML *= LOG2E
    else:
        scores_ML *= scale * LOG2E
    if HAS_ALIBI:
        scores_ML += slope_M[:, None] * (LOG2E * (position_L[None, :] - query_position_M[:, None]))
    scores_ML = tl.where(is_seen_ML, scores_ML, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(scores_ML, 1))
    base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    weights_ML = tl.exp2(scores_ML - base_M[:, None])
    decay_M = tl.exp2(peak_M - base_M)
    return weights_ML, decay_M, new_peak_M, sum_M * decay_M + tl.sum(weights_ML, 1)


@triton.jit
def unpack_pairs(pairs):
    """Two float8 e4m3 in 16 bits as two float16, 256 times too small: the bits of one format moved to their places in the
    other, whose exponent has a bias 8 larger."""
    if PORTABLE:
        bits = pairs.to(tl.int32)
        even = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        odd = (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        return even.to(tl.uint16).to(tl.float16, bitcast=True), odd.to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 sign, rest;
        and.b32 rest, $2, 0x007f007f; shl.b32 rest, rest, 7; and.b32 sign, $2, 0x00800080; shl.b32 sign, sign, 8;
        or.b32 $0, rest, sign;
        and.b32 rest, $2, 0x7f007f00; shr.b32 rest, rest, 1; and.b32 sign, $2, 0x80008000; or.b32 $1, rest, sign; }""",
        "=r,=r,r",
        [pairs],
        (tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def finish(peak_M, sum_M, acc_MH, sinks, head_M, is_head_M, v_scale, HAS_SINKS: tl.constexpr):
    """The softmax's division; a sink is one more score whose value is zero."""
    if HAS_SINKS:
        sink_M = tl.load(sinks + head_M, mask=is_head_M, other=0.0).to(tl.float32) * LOG2E
        new_peak_M = tl.maximum(peak_M, sink_M)
        decay_M = tl.exp2(peak_M - new_peak_M)
        sum_M = sum_M * decay_M + tl.exp2(sink_M - new_peak_M)
        acc_MH *= decay_M[:, None]
    sum_M = tl.where(is_head_M, sum_M, 1.0)
    return acc_MH * (v_scale / sum_M)[:, None]


@triton.jit
def combine(
    parts_acc,
    parts_softmax,
    first_program,
    num_parts,
    head_R,
    sinks,
    v_scale,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Put a head's parts together in order. A program leaves the part it began in the middle of a head at place 0, the
    one it began at a head's first tile at place 1."""
    r_R, dim_H = tl.arange(0, R_PAD), tl.arange(0, H_PAD)
    is_row_1R, in_head_11H = (r_R < R)[None, :], (dim_H < H)[None, None, :]
    peak_R = tl.full((R_PAD,), float("-inf"), tl.float32)
    sum_R = tl.zeros((R_PAD,), tl.float32)
    acc_RH = tl.zeros((R_PAD, H_PAD), tl.float32)
    for start in range(0, num_parts, PARTS):
        part_I = start + tl.arange(0, PARTS)
        place_I = ((first_program + part_I) * 2 + tl.where(part_I == 0, 1, 0)).to(tl.int64)
        mask_IR = (part_I < num_parts)[:, None] & is_row_1R
        row_IR = place_I[:, None] * R + r_R[None, :]
        peak_IR = tl.load(parts_softmax + row_IR * 2, mask=mask_IR, other=float("-inf"), cache_modifier=".cg")
        sum_IR = tl.load(parts_softmax + row_IR * 2 + 1, mask=mask_IR, other=0.0, cache_modifier=".cg")
        acc_IRH = tl.load(
            parts_acc + row_IR[:, :, None] * H + dim_H[None, None, :],
            mask=mask_IR[:, :, None] & in_head_11H,
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak_R = tl.maximum(peak_R, tl.max(peak_IR, 0))
        base_R = tl.where(new_peak_R == float("-inf"), 0.0, new_peak_R)
        weight_IR, decay_R = tl.exp2(peak_IR - base_R[None, :]), tl.exp2(peak_R - base_R)
        sum_R = sum_R * decay_R + tl.sum(weight_IR * sum_IR, 0)
        acc_RH = acc_RH * decay_R[:, None] + tl.sum(weight_IR[:, :, None] * acc_IRH, 0)
        peak_R = new_peak_R
    return finish(peak_R, sum_R, acc_RH, sinks, head_R, r_R < R, v_scale, HAS_SINKS)
