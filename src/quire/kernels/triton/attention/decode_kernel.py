"""The kernel for attention of requests that compute one token, or a few behind many, over pages.

It is split over the keys and balanced over the device.

The step's work is a line of tiles (of `TILE` keys each): request after request, KV head after KV head. Every program takes
an equal stretch of the line, so that one request of 30,000 tokens and 256 of 256 tokens load the device alike; where
stretches begin is computed from the lengths on the device. A head whose tiles lie in several stretches is put
together, in order, by whichever of their programs ends last (flash decoding, Dao et al. 2023; stream-K, Osama et al. 2023).

Requests that compute a few tokens behind a long context (a cached prompt with a new end) are cut into tiles of TOKENS
queries; a query tile of a KV head then takes the place of a head. A prefill kernel would give each such tile to one program,
which walks all keys alone: 76 ms for 16 tokens behind 100,000 (8B, H200), where a decode step takes 7.

The fused form also norms and rotates the heads and writes the new token's keys and values to its slot; the new token is
attended to from registers, so that nobody waits for the page.

Legend: B requests, N query heads, K KV heads, G query heads of one KV head, R rows of a query tile (tokens times G), M the
same padded for the matrix units, H head size, S tokens a page, L keys of a tile, I parts of a head that programs left behind.
"""

import triton
import triton.language as tl

from quire.attention.interface import LONG_CONTEXT
from quire.kernels.triton.attention.decode_tiles import (
    FP8_TO_FP16,
    LOG2E,
    combine,
    finish,
    load_pages,
    softmax_step,
    unpack_pairs,
)
from quire.kernels.triton.attention.rope import load_cos_sin, norm_and_rotate, rotary_partner, to_cache_type
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait

MIN_CONTEXT = tl.constexpr(LONG_CONTEXT)


@triton.jit
def is_short(query_len, seq_len, most_tokens):
    """Whether a request computes a few tokens (2 to `most_tokens`) behind a long context; `most_tokens` 0: none does."""
    return (query_len > 1) & (query_len <= most_tokens) & (seq_len - query_len >= MIN_CONTEXT)


@triton.jit
def _tiles_of(
    seq_len, query_len, window, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNK: tl.constexpr, FUSED: tl.constexpr
):
    """The first position that its first query sees, and the number of tiles from there. A request of length 0 has none."""
    first = tl.zeros_like(seq_len)
    if HAS_WINDOW:
        first = tl.maximum(seq_len - query_len + 1 - window, 0)
    if CHUNK > 0:
        first = tl.maximum(first, (seq_len - query_len) // CHUNK * CHUNK)
    num_cached = seq_len
    if FUSED:  # The new token's keys are not in its page yet.
        num_cached = seq_len - 1
    tiles = tl.maximum((num_cached + TILE - 1) // TILE - first // TILE, 1)
    return first, tl.where(seq_len > 0, tiles, 0)


@triton.jit
def _find_request(
    unit,
    units_end_B,
    tiles_B,
    query_start,
    seq_lens,
    window,
    K: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    FUSED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Whose tile it is: the request, the units before it, its length, query length, first position and tiles a head.
    `tiles_B`: a request's tiles, of all its query tiles."""
    # The number of requests before it and of their tiles, in one reduction.
    before = tl.sum(tl.where(units_end_B <= unit, (tiles_B.to(tl.int64) << 32) + 1, 0), 0)
    b = (before & 0xFFFFFFFF).to(tl.int32)
    seq_len = tl.load(seq_lens + b)
    query_len = 1
    if SHORT:
        query_len = tl.load(query_start + b + 1) - tl.load(query_start + b)
    first, num_tiles = _tiles_of(seq_len, query_len, window, TILE, HAS_WINDOW, CHUNK, FUSED)
    return b, (before >> 32).to(tl.int32) * K, seq_len, query_len, first, num_tiles


@triton.jit
def _prefetch(
    cache_head,
    table_row,
    start,
    end,
    page_stride,
    value_offset,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Ask for the keys and values of a short stretch to be brought into L2."""
    CHUNK: tl.constexpr = PAGE if PAGE < TILE else TILE
    BYTES: tl.constexpr = CHUNK * H * cache_head.dtype.element_ty.primitive_bitwidth // 8
    i = tl.arange(0, 128)  # Half of them for keys, half for values: 64 chunks at most.
    position = start + (i // 2) * CHUNK
    is_wanted = position < end
    page = tl.load(table_row + position // PAGE, mask=is_wanted, other=0).to(tl.int64)
    address = cache_head + page * page_stride + (position % PAGE) * H + (i % 2) * value_offset
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [address, is_wanted.to(tl.int32), tl.full((128,), BYTES, tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_requests", "window", "min_share", "early_keys", "most_tokens", "table_stride"])
def decode_kernel(
    qkv,
    cache,
    tiles,
    out,
    query_start,
    seq_lens,
    rows,
    block_table,
    slots,
    parts_acc,
    parts_softmax,
    arrivals,
    cos_sin,
    q_norm,
    k_norm,
    sinks,
    slopes,
    scale,
    soft_cap,
    k_scale,
    v_scale,
    eps,
    num_requests,
    window,
    min_share,
    early_keys,
    most_tokens,
    qkv_stride,
    table_stride,
    page_stride,
    value_offset,
    tile_page_stride,
    tile_value_offset,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    B_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PAIRED: tl.constexpr,
    FUSED: tl.constexpr,
    PDL: tl.constexpr,
    CHUNK: tl.constexpr = 0,
    SHORT: tl.constexpr = False,
    TOKENS: tl.constexpr = 1,
):
    """One program's stretch of the line: for each head that it touches, the tiles it has of it, then either the head's
    output or a part of it. `tiles` is the cache again, fp8 as pairs of 16 bits."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    m_M, dim_H, offset_L = tl.arange(0, M), tl.arange(0, H_PAD), tl.arange(0, TILE)
    g_G = tl.arange(0, G_PAD)
    in_head_1H = (dim_H < H)[None, :]
    # A query tile's rows: its tokens, each with the heads of the group; of a single token the group alone.
    R: tl.constexpr = TOKENS * G_PAD if SHORT else G
    R_PAD: tl.constexpr = TOKENS * G_PAD if SHORT else G_PAD
    g_M = m_M % G_PAD if SHORT else m_M
    is_head_M = g_M < G
    mask_GH = (g_G < G)[:, None] & in_head_1H
    partner_H, pair_H, sign_H = rotary_partner(dim_H, ROTARY_DIM, INTERLEAVED)
    W: tl.constexpr = H // 2 if PAIRED else H
    W_PAD: tl.constexpr = H_PAD // 2 if PAIRED else H_PAD
    dim_W = tl.arange(0, W_PAD)
    in_head_1W = (dim_W < W)[None, :]
    # Fused: what the step's first kernels wrote (lengths, pages, positions) and pages of earlier steps may be read before
    # the wait, since the kernels between waited for them; the projection's output may not.
    if PDL and not FUSED:
        gdc_wait()
        gdc_launch_dependents()

    # The line of tiles, and this program's stretch of it.
    b_B = tl.arange(0, B_PAD)
    is_request_B = b_B < num_requests
    token_B = tl.load(query_start + b_B, mask=is_request_B, other=0)
    next_token_B = tl.load(query_start + b_B + 1, mask=is_request_B, other=0)
    query_len_B = next_token_B - token_B
    if SHORT:
        len_B = tl.load(seq_lens + b_B, mask=is_request_B, other=0)
        len_B = tl.where(is_short(query_len_B, len_B, most_tokens), len_B, 0)
        _, tiles_B = _tiles_of(len_B, query_len_B, window, TILE, HAS_WINDOW, CHUNK, FUSED)
        tiles_B *= (query_len_B + TOKENS - 1) // TOKENS
    else:
        len_B = tl.load(seq_lens + b_B, mask=is_request_B & (query_len_B == 1), other=0)
        _, tiles_B = _tiles_of(len_B, 1, window, TILE, HAS_WINDOW, CHUNK, FUSED)
    units_end_B = tl.cumsum(tiles_B, 0) * K
    num_units = tl.sum(tiles_B, 0) * K
    share = tl.maximum((num_units + num_programs - 1) // num_programs, min_share)
    unit = program * share
    stretch_end = tl.minimum(unit + share, num_units)

    while unit < stretch_end:
        b, units_before, seq_len, query_len, first, num_tiles = _find_request(
            unit, units_end_B, tiles_B, query_start, seq_lens, window, K, TILE, HAS_WINDOW, CHUNK, FUSED, SHORT
        )
        token = b.to(tl.int64)
        if not FUSED:
            token = tl.load(query_start + b).to(tl.int64)
        table_row = block_table + tl.load(rows + b).to(tl.int64) * table_stride
        head = (unit - units_before) // num_tiles
        head_start = units_before + head * num_tiles
        kv_head = head
        arrival = b * K + kv_head
        first_query = 0
        if SHORT:
            kv_head = head % K
            first_query = head // K * TOKENS
            # Room for every request's query tiles, as if each had one more.
            arrival = ((token // TOKENS).to(tl.int32) + b + head // K) * K + kv_head
            token += first_query
        tile_start = unit - head_start
        tile_end = tl.minimum(num_tiles, tile_start + stretch_end - unit)
        is_last = tile_end == num_tiles

        cache_head = cache + kv_head * (PAGE * H)
        first_tile = first // TILE
        cos_1H, sin_1H = 1.0, 0.0
        slot = 0
        if FUSED:
            slot = tl.load(slots + token)
            if HAS_ROPE:
                cos_H, sin_H = load_cos_sin(cos_sin, seq_len - 1, dim_H, pair_H, sign_H, ROTARY_DIM, True)
                cos_1H, sin_1H = cos_H[None, :], sin_H[None, :]
            if PDL:
                if share * TILE <= early_keys:
                    begin, end = (first_tile + tile_start) * TILE, tl.minimum((first_tile + tile_end) * TILE, seq_len)
                    _prefetch(cache_head, table_row, begin, end, page_stride, value_offset, H, PAGE, TILE)
                gdc_wait()
                gdc_launch_dependents()

        # Queries, and the new token's keys and values.
        head_M = kv_head * G + g_M
        token_row = qkv + token * qkv_stride
        q_G1 = token_row + ((kv_head * G + g_G) * H)[:, None]
        query_position_M = tl.full((M,), 0, tl.int32) + seq_len - 1
        is_row_M = is_head_M
        if SHORT:
            query_position_M = seq_len - query_len + first_query + m_M // G_PAD
            is_row_M = is_head_M & (query_position_M < seq_len)
        mask_MH = is_row_M[:, None] & in_head_1H
        q_GH = tl.load(q_G1 + dim_H[None, :], mask=mask_GH, other=0.0)
        slope_M = tl.zeros((M,), tl.float32)
        if HAS_ALIBI:
            slope_M = tl.load(slopes + head_M, mask=is_head_M, other=0.0).to(tl.float32)
        num_cached = seq_len
        peak_M = tl.full((M,), float("-inf"), tl.float32)
        sum_M = tl.zeros((M,), tl.float32)
        acc_MH = tl.zeros((M, H_PAD), tl.float32)
        if FUSED:
            num_cached = seq_len - 1
            in_new_1H = in_head_1H & is_last
            k_row = token_row + (K * G + kv_head) * H
            k_1H = tl.load(k_row + dim_H[None, :], mask=in_new_1H, other=0.0).to(tl.float32)
            v_1H = tl.load(k_row + K * H + dim_H[None, :], mask=in_new_1H, other=0.0).to(tl.float32)
            q_partner_GH, k_partner_1H = q_GH.to(tl.float32), k_1H
            if HAS_ROPE:
                q_partner_GH = tl.load(q_G1 + partner_H[None, :], mask=mask_GH, other=0.0).to(tl.float32)
                k_partner_1H = tl.load(k_row + partner_H[None, :], mask=in_new_1H, other=0.0).to(tl.float32)
            q_weight_1H, q_partner_weight_1H, k_weight_1H, k_partner_weight_1H = 1.0, 1.0, 1.0, 1.0
            if HAS_NORM:
                q_weight_1H = tl.load(q_norm + dim_H, mask=dim_H < H)[None, :]
                q_partner_weight_1H = tl.load(q_norm + partner_H, mask=dim_H < H)[None, :]
                k_weight_1H = tl.load(k_norm + dim_H, mask=dim_H < H)[None, :]
                k_partner_weight_1H = tl.load(k_norm + partner_H, mask=dim_H < H)[None, :]
            q_GH = norm_and_rotate(
                q_GH.to(tl.float32),
                q_partner_GH,
                q_weight_1H,
                q_partner_weight_1H,
                cos_1H,
                sin_1H,
                eps,
                H,
                HAS_NORM,
                HAS_ROPE,
            ).to(q_GH.dtype)
            k_1H = norm_and_rotate(
                k_1H, k_partner_1H, k_weight_1H, k_partner_weight_1H, cos_1H, sin_1H, eps, H, HAS_NORM, HAS_ROPE
            )
            k_1H = to_cache_type(k_1H, 1.0 / k_scale, cache.dtype.element_ty)
            v_1H = to_cache_type(v_1H, 1.0 / v_scale, cache.dtype.element_ty)
            target = cache_head + (slot // PAGE) * page_stride + (slot % PAGE) * H
            tl.store(target + dim_H[None, :], k_1H, mask=in_new_1H & (slot >= 0))
            tl.store(target + value_offset + dim_H[None, :], v_1H, mask=in_new_1H & (slot >= 0))
            score_G = tl.sum(q_GH.to(tl.float32) * k_1H.to(tl.float32), 1) * (scale * k_scale)
            if HAS_CAP:
                score_G = soft_cap * (1 - 2 / (1 + tl.exp2(score_G * (2 * LOG2E / soft_cap))))
            score_M = tl.reshape(tl.broadcast_to(score_G[None, :], (M // G_PAD, G_PAD)), (M,))
            peak_M = tl.where(is_last, score_M * LOG2E, peak_M)
            sum_M = tl.where(is_last, 1.0, sum_M)
            acc_MH = tl.where(is_last, v_1H.to(tl.float32), acc_MH)

        # The tiles. Float8 is read two values at a time, of even and odd places.
        tiles_head = tiles + kv_head * (PAGE * W)
        if SHORT:
            q_row_M = (m_M // G_PAD).to(tl.int64) * qkv_stride + head_M * H
            q_MH = tl.load(token_row + q_row_M[:, None] + dim_H[None, :], mask=mask_MH, other=0.0)
        else:  # Rows beyond the group's repeat it; what becomes of them is never read.
            q_MH = tl.reshape(tl.broadcast_to(q_GH[None, :, :], (M // G_PAD, G_PAD, H_PAD)), (M, H_PAD))
        q_odd_MW = q_MH
        acc_odd_MW = acc_MH
        tile_scale = scale * k_scale
        if PAIRED:
            q_MH, q_odd_MW = tl.split(tl.reshape(q_MH.to(tl.float16), (M, W_PAD, 2)))
            acc_MH, acc_odd_MW = tl.split(tl.reshape(acc_MH * (1 / FP8_TO_FP16), (M, W_PAD, 2)))
            tile_scale *= FP8_TO_FP16
        for tile in tl.range(tile_start, tile_end, num_stages=STAGES):
            position_L = (first_tile + tile) * TILE + offset_L
            is_seen_L = (position_L >= first) & (position_L < num_cached)
            page_L = load_pages(table_row + tl.minimum(position_L, seq_len - 1) // PAGE).to(tl.int64)
            key_L1 = (page_L * tile_page_stride + (position_L % PAGE) * W)[:, None]
            mask_LW = is_seen_L[:, None] & in_head_1W
            k_LW = tl.load(tiles_head + key_L1 + dim_W[None, :], mask=mask_LW, other=0)
            v_LW = tl.load(tiles_head + tile_value_offset + key_L1 + dim_W[None, :], mask=mask_LW, other=0)
            if PAIRED:
                k_even_LW, k_odd_LW = unpack_pairs(k_LW)
                scores_ML = tl.dot(q_MH, tl.trans(k_even_LW))
                scores_ML = tl.dot(q_odd_MW, tl.trans(k_odd_LW), scores_ML)
            else:
                scores_ML = tl.dot(q_MH, tl.trans(k_LW.to(q_MH.dtype)), input_precision="ieee")
            is_seen_ML = is_seen_L[None, :]
            if SHORT:
                is_seen_ML = is_seen_ML & (position_L[None, :] <= query_position_M[:, None])
                if HAS_WINDOW:
                    is_seen_ML = is_seen_ML & (position_L[None, :] > query_position_M[:, None] - window)
                if CHUNK > 0:
                    is_seen_ML = is_seen_ML & (position_L[None, :] >= (query_position_M // CHUNK * CHUNK)[:, None])
            weights_ML, decay_M, peak_M, sum_M = softmax_step(
                scores_ML,
                position_L,
                is_seen_ML,
                query_position_M,
                peak_M,
                sum_M,
                slope_M,
                tile_scale,
                soft_cap,
                HAS_CAP,
                HAS_ALIBI,
            )
            if PAIRED:
                v_even_LW, v_odd_LW = unpack_pairs(v_LW)
                acc_MH = tl.dot(weights_ML.to(tl.float16), v_even_LW, acc_MH * decay_M[:, None])
                acc_odd_MW = tl.dot(weights_ML.to(tl.float16), v_odd_LW, acc_odd_MW * decay_M[:, None])
            else:
                acc_MH = tl.dot(
                    weights_ML.to(q_MH.dtype), v_LW.to(q_MH.dtype), acc_MH * decay_M[:, None], input_precision="ieee"
                )
        if PAIRED:
            acc_MH = tl.reshape(tl.join(acc_MH, acc_odd_MW), (M, H_PAD)) * FP8_TO_FP16

        if tile_end - tile_start == num_tiles:
            done_MH = finish(peak_M, sum_M, acc_MH, sinks, head_M, is_head_M, v_scale, HAS_SINKS)
            out_MH = out + token * (K * G * H) + (head_M * H)[:, None] + dim_H[None, :]
            if SHORT:
                out_MH += ((m_M // G_PAD) * (K * G * H))[:, None]
            tl.store(out_MH, done_MH.to(out.dtype.element_ty), mask=mask_MH)
        else:
            place = (program * 2 + tl.where(tile_start == 0, 1, 0)).to(tl.int64)
            part_M = place * R + m_M
            tl.store(parts_softmax + part_M * 2, peak_M, mask=is_row_M)
            tl.store(parts_softmax + part_M * 2 + 1, sum_M, mask=is_row_M)
            tl.store(parts_acc + (part_M * H)[:, None] + dim_H[None, :], acc_MH, mask=mask_MH)
            first_program, last_program = head_start // share, (head_start + num_tiles - 1) // share
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + arrival, 1, sem="acq_rel", scope="gpu")
            if arrived == last_program - first_program:
                tl.store(arrivals + arrival, 0)
                r_R = tl.arange(0, R_PAD)
                head_R = kv_head * G + r_R % G_PAD
                done_RH = combine(
                    parts_acc,
                    parts_softmax,
                    first_program,
                    last_program - first_program + 1,
                    head_R,
                    sinks,
                    v_scale,
                    R,
                    R_PAD,
                    H,
                    H_PAD,
                    PARTS,
                    HAS_SINKS,
                )
                is_row_R = r_R % G_PAD < G
                if SHORT:
                    is_row_R = is_row_R & (first_query + r_R // G_PAD < query_len)
                out_R = (token + r_R // G_PAD) * (K * G * H) + head_R * H
                out_RH = out + out_R[:, None] + dim_H[None, :]
                tl.store(out_RH, done_RH.to(out.dtype.element_ty), mask=is_row_R[:, None] & in_head_1H)
        unit += tile_end - tile_start
    if (
        PDL and FUSED
    ):  # Who has nothing to do waits too, so that whoever waits for this kernel waits for those before it.
        gdc_wait()
        gdc_launch_dependents()
