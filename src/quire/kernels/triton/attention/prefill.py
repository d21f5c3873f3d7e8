"""Attention of prompts and chunks of prompts over pages: every request of a step whose query is long enough.

A program computes one tile of rows of one request: the tokens of the tile times the query heads that share a KV head (so a
tile of 128 rows is 32 tokens of 4 heads, and little of it is wasted on the causal diagonal). It walks the keys in tiles, in
order of position: first those that every row sees, then those at an edge (the causal diagonal, a window's beginning), which
alone are masked. The softmax runs along (Dao et al., FlashAttention-2), in base 2. Without causality there is no diagonal:
every row sees the request's end.

A row's bits depend on its own query, keys and position alone: tiles of keys begin at multiples of the tile's size, a tile
that a row does not see changes nothing in it, and whether a tile was masked changes no arithmetic. What may change them is
the choice of the tile's sizes (`choose_tiles`): `deterministic` fixes it.

Legend: T tokens, N query heads, K KV heads, H head size, M rows of a tile, S keys of a tile, D head size up to a power of 2.
"""

import dataclasses
import functools
import importlib
import math
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.triton.attention.decode_kernel import is_short
from quire.kernels.triton.launch import await_previous, cdiv, compute_capability, launch_options, next_power_of_2

LOG2_E = math.log2(math.e)
SHORT = 64
"""Rows (tokens times heads of a KV head) up to which a request is better served by small tiles."""


@triton.jit
def find_request(query_start, num_requests, block, TOKENS: tl.constexpr):
    """The request that a tile belongs to, if request b's tiles begin at query_start[b] // TOKENS + b: enough room for all."""
    request = -1
    for first in range(0, num_requests, 256):
        b = first + tl.arange(0, 256)
        start_B = tl.load(query_start + b, mask=b < num_requests, other=1 << 30)
        request += tl.sum((start_B // TOKENS + b <= block).to(tl.int32), 0)
    return request


@triton.jit
def _attend_tiles(
    acc_MD,
    sum_M,
    max_M,
    q_MD,
    position_M,
    last_M,
    first_position,
    ends,
    slope_M,
    pages,
    k_head,
    v_head,
    page_stride,
    low,
    high,
    first_visible,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_S: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Keys low to high - 1 (low is a multiple of TILE_S) for all rows; a causal row sees them up to `last_M`; those behind itself
    if these see as far (`ends`). `scale` makes a score a power of two."""
    offset_S = tl.arange(0, TILE_S)
    d = tl.arange(0, BLOCK_D)
    for start in tl.range(low, high, TILE_S):  # type: ignore[attr-defined]
        k_position_S = start + offset_S
        if MASKED:
            # Beyond the ends a page may hold anything: zero times infinity is not zero.
            inside_S = (k_position_S < high) & (k_position_S >= first_visible)
            page_S = tl.load(pages + k_position_S // PAGE, mask=inside_S, other=0).to(tl.int64)
        else:
            page_S = tl.load(pages + k_position_S // PAGE).to(tl.int64)
        at_SD = (page_S * page_stride + (k_position_S % PAGE) * HEAD_DIM)[:, None] + d[None, :]
        if MASKED and HEAD_DIM < BLOCK_D:
            k_SD = tl.load(k_head + at_SD, mask=inside_S[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
            v_SD = tl.load(v_head + at_SD, mask=inside_S[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            k_SD = tl.load(k_head + at_SD, mask=inside_S[:, None], other=0.0)
            v_SD = tl.load(v_head + at_SD, mask=inside_S[:, None], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k_SD = tl.load(k_head + at_SD, mask=(d < HEAD_DIM)[None, :], other=0.0)
            v_SD = tl.load(v_head + at_SD, mask=(d < HEAD_DIM)[None, :], other=0.0)
        else:
            k_SD = tl.load(k_head + at_SD)
            v_SD = tl.load(v_head + at_SD)
        score_MS = tl.dot(q_MD, tl.trans(k_SD.to(q_MD.dtype)), input_precision="ieee")
        if SOFT_CAP:
            # cap * tanh(x / cap); `soft_cap` and `scale` come with their factors of log2(e).
            score_MS = soft_cap * (1.0 - 2.0 / (tl.exp2(score_MS * scale) + 1.0))
        elif ALIBI:
            score_MS = score_MS * scale
        if ALIBI:
            score_MS += slope_M[:, None] * (k_position_S[None, :] - position_M[:, None])
        if MASKED:
            if CAUSAL:
                visible_MS = (k_position_S[None, :] <= last_M[:, None]) & inside_S[None, :]
                if ITEMS:  # those behind a row are keys of the step
                    end_S = tl.load(ends + k_position_S, mask=inside_S & (k_position_S > first_position), other=0)
                    is_before_MS = k_position_S[None, :] <= position_M[:, None]
                    visible_MS = visible_MS & (is_before_MS | (end_S[None, :] == last_M[:, None] + 1))
                if WINDOW > 0:
                    visible_MS = visible_MS & (k_position_S[None, :] > position_M[:, None] - WINDOW)
                if CHUNK > 0:
                    visible_MS = visible_MS & (k_position_S[None, :] >= (position_M // CHUNK * CHUNK)[:, None])
            else:
                visible_MS = inside_S[None, :]
                if WINDOW > 0:
                    distance_MS = k_position_S[None, :] - position_M[:, None]
                    visible_MS = visible_MS & (tl.abs(distance_MS) <= WINDOW // 2)
            score_MS = tl.where(visible_MS, score_MS, float("-inf"))
        if SOFT_CAP or ALIBI:
            new_max_M = tl.maximum(max_M, tl.max(score_MS, 1))
        else:
            new_max_M = tl.maximum(max_M, tl.max(score_MS, 1) * scale)
        # A row that has seen nothing yet: its maximum is minus infinity, its weights shall be zero and not NaN.
        pivot_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED else new_max_M
        if SOFT_CAP or ALIBI:
            weight_MS = tl.exp2(score_MS - pivot_M[:, None])
        else:
            weight_MS = tl.exp2(tl.fma(score_MS, scale, -pivot_M[:, None]))
        decay_M = tl.exp2(max_M - pivot_M)
        sum_M = tl.fma(sum_M, decay_M, tl.sum(weight_MS, 1))
        acc_MD = acc_MD * decay_M[:, None]
        acc_MD = tl.dot(weight_MS.to(q_MD.dtype), v_SD.to(q_MD.dtype), acc_MD, input_precision="ieee")
        max_M = new_max_M
    return acc_MD, sum_M, max_M


@triton.jit(do_not_specialize=["num_requests", "min_query_len", "short_tokens"])
def _prefill_kernel(
    qkv,
    out,
    kv_cache,
    query_start,
    seq_lens,
    rows,
    block_table,
    sinks,
    alibi_slopes,
    seen_end,
    lse,
    num_requests,
    qkv_stride,
    out_stride,
    block_table_stride,
    v_offset,
    scale,
    soft_cap,
    v_scale,
    min_query_len,
    short_tokens,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_S: tl.constexpr,
    PDL: tl.constexpr,
    CAUSAL: tl.constexpr = True,
    CHUNK: tl.constexpr = 0,
    PAGE_STRIDE: tl.constexpr = 0,
    ITEMS: tl.constexpr = False,
    LSE: tl.constexpr = False,
):
    """`PAGE_STRIDE`: from a page to the next, where that is more than a page of keys."""
    await_previous(PDL)
    TOKENS: tl.constexpr = TILE_M // PACK
    PARTS: tl.constexpr = (GROUP + PACK - 1) // PACK
    # The last tiles of a request have the most keys: they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS

    request = find_request(query_start, num_requests, block, TOKENS)
    query_begin = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - query_begin
    first_token = (block - (query_begin // TOKENS + request)) * TOKENS
    if first_token >= query_len or query_len < min_query_len:
        return
    seq_len = tl.load(seq_lens + request)
    if is_short(query_len, seq_len, short_tokens):
        return
    pages = block_table + tl.load(rows + request).to(tl.int64) * block_table_stride

    m = tl.arange(0, TILE_M)
    d = tl.arange(0, BLOCK_D)
    token_M = first_token + m // PACK
    group_head_M = part * PACK + m % PACK
    head_M = kv_head * GROUP + group_head_M
    real_M = (token_M < query_len) & (m < TOKENS * PACK) & (group_head_M < GROUP)
    row_M = (query_begin + token_M).to(tl.int64)
    real_MD = real_M[:, None] & (d < HEAD_DIM)[None, :]
    q_MD = tl.load(qkv + (row_M * qkv_stride + head_M * HEAD_DIM)[:, None] + d[None, :], mask=real_MD, other=0.0)

    first_position = seq_len - query_len + first_token
    position_M = first_position + m // PACK
    last_position = tl.minimum(first_position + TOKENS, seq_len) - 1
    last_M = position_M
    ends = seen_end + (query_begin - seq_len + query_len)  # of the key at a position
    if ITEMS:
        last_M = tl.maximum(position_M, tl.load(seen_end + row_M, mask=real_M, other=0) - 1)
    if ALIBI:
        slope_M = tl.load(alibi_slopes + head_M, mask=real_M, other=0.0).to(tl.float32) * 1.4426950408889634
    else:
        slope_M = tl.zeros([TILE_M], dtype=tl.float32)
    if SINKS:
        max_M = tl.load(sinks + head_M, mask=real_M, other=0.0).to(tl.float32) * 1.4426950408889634
        sum_M = tl.full([TILE_M], 1.0, dtype=tl.float32)
    else:
        max_M = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
        sum_M = tl.zeros([TILE_M], dtype=tl.float32)
    acc_MD = tl.zeros([TILE_M, BLOCK_D], dtype=tl.float32)

    page_stride = PAGE_STRIDE if PAGE_STRIDE > 0 else NUM_KV_HEADS * PAGE * HEAD_DIM
    k_head = kv_cache + kv_head * (PAGE * HEAD_DIM)
    v_head = k_head + v_offset
    first_visible = 0
    low = 0
    high = last_position + 1
    if ITEMS:  # an item ends within its request
        high = tl.maximum(high, tl.minimum(tl.max(last_M, 0) + 1, seq_len))
    full_end = (first_position + 1) // TILE_S * TILE_S
    BEFORE: tl.constexpr = WINDOW - 1 if CAUSAL else WINDOW // 2
    if not CAUSAL:
        high = seq_len
        full_end = seq_len // TILE_S * TILE_S
        if WINDOW > 0:
            high = tl.minimum(last_position + BEFORE + 1, seq_len)
            full_end = tl.minimum(first_position + BEFORE + 1, seq_len) // TILE_S * TILE_S
    if WINDOW > 0 or CHUNK > 0:
        last_begin = 0
        if WINDOW > 0:
            first_visible = tl.maximum(first_position - BEFORE, 0)
            last_begin = tl.maximum(last_position - BEFORE, 0)
        if CHUNK > 0:
            first_visible = tl.maximum(first_position // CHUNK * CHUNK, first_visible)
            last_begin = tl.maximum(last_position // CHUNK * CHUNK, last_begin)
        low = first_visible // TILE_S * TILE_S
        full_end = tl.maximum(full_end, low)
        full_begin = (last_begin + TILE_S - 1) // TILE_S * TILE_S
        full_begin = tl.minimum(full_begin, full_end)
        acc_MD, sum_M, max_M = _attend_tiles(
            acc_MD,
            sum_M,
            max_M,
            q_MD,
            position_M,
            last_M,
            first_position,
            ends,
            slope_M,
            pages,
            k_head,
            v_head,
            page_stride,
            low,
            full_begin,
            first_visible,
            scale,
            soft_cap,
            WINDOW,
            SOFT_CAP,
            ALIBI,
            CAUSAL,
            CHUNK,
            True,
            HEAD_DIM,
            BLOCK_D,
            PAGE,
            TILE_S,
            ITEMS,
        )
        low = full_begin
    acc_MD, sum_M, max_M = _attend_tiles(
        acc_MD,
        sum_M,
        max_M,
        q_MD,
        position_M,
        last_M,
        first_position,
        ends,
        slope_M,
        pages,
        k_head,
        v_head,
        page_stride,
        low,
        full_end,
        first_visible,
        scale,
        soft_cap,
        WINDOW,
        SOFT_CAP,
        ALIBI,
        CAUSAL,
        CHUNK,
        False,
        HEAD_DIM,
        BLOCK_D,
        PAGE,
        TILE_S,
        ITEMS,
    )
    acc_MD, sum_M, max_M = _attend_tiles(
        acc_MD,
        sum_M,
        max_M,
        q_MD,
        position_M,
        last_M,
        first_position,
        ends,
        slope_M,
        pages,
        k_head,
        v_head,
        page_stride,
        full_end,
        high,
        first_visible,
        scale,
        soft_cap,
        WINDOW,
        SOFT_CAP,
        ALIBI,
        CAUSAL,
        CHUNK,
        True,
        HEAD_DIM,
        BLOCK_D,
        PAGE,
        TILE_S,
        ITEMS,
    )

    result_MD = acc_MD * (v_scale / tl.where(sum_M == 0.0, 1.0, sum_M))[:, None]
    tl.store(
        out + (row_M * out_stride + head_M * HEAD_DIM)[:, None] + d[None, :],
        result_MD.to(out.dtype.element_ty),
        mask=real_MD,
    )
    if LSE:  # the softmax is in base 2
        denominator_M = (max_M + tl.log2(tl.where(sum_M == 0.0, 1.0, sum_M))) * 0.6931471805599453
        tl.store(lse + row_M * (NUM_KV_HEADS * GROUP) + head_M, denominator_M, mask=real_M)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a step is cut: rows and keys of a tile, and how a program runs."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tiles(head_dim: int, dtype: torch.dtype, max_rows: int | None) -> Tiles:
    """The tile's sizes for a layer.

    Args:
        max_rows: the most rows that a request can have of one KV head (tokens times heads), if that may be used; results
            may then differ in their last bits between steps of long and of short queries.
    """
    if dtype == torch.float32:
        return Tiles(64, 32, 4, 2) if head_dim <= 128 else Tiles(32, 32, 4, 2)
    if head_dim > 128:
        tiles = Tiles(128, 64, 8, 2)
    elif head_dim > 64:
        tiles = Tiles(128, 128, 8, 3)
    else:
        tiles = Tiles(128, 128, 8, 3)
    if max_rows is not None and max_rows <= SHORT:
        return dataclasses.replace(tiles, rows=64 if max_rows > 16 else 16, keys=64, num_warps=4, num_stages=3)
    return tiles


GLUON_RELEASE = "3.6."
"""Triton's releases whose Gluon the Hopper kernel is written in; others take the portable kernel."""


@functools.cache
def _hopper_kernel() -> ModuleType | None:
    """The module of Hopper's own kernel, where it can run. Its dialect is still changing between Triton's releases."""
    if compute_capability()[0] != 9 or not triton.__version__.startswith(GLUON_RELEASE):
        return None
    try:
        return importlib.import_module("quire.kernels.triton.attention.hopper")
    except ImportError:  # a Triton without that dialect
        return None


def prefill_attention(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: torch.Tensor,
    min_query_len: int = 2,
    tiles: Tiles | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention over pages of every request with at least `min_query_len` tokens in this step, but for those that
    `decode.is_short` leaves to the decode kernel.

    Args:
        qkv: [T, (N + 2K) * H]; its first N * H columns are the queries, rotated. Their keys and values are in the pages.
        kv_cache: [2, pages, K, page size, H]; planes and pages may have any stride.
        out: [T, N * H]; rows of other requests, and rows beyond the step's tokens, are left as they are.
        tiles: these, instead of what is best here (Hopper's own kernel, or tiles that `choose_tiles` says).
        lse: float32 [T, N]; gets the logarithms of the softmaxes' denominators.
    """
    if metadata.max_query_len < min_query_len or metadata.num_tokens == 0:
        return
    group = params.num_heads // params.num_kv_heads
    seen_end = metadata.seen_end if params.sees_items else None
    if tiles is None:
        max_rows = None if params.deterministic else metadata.max_query_len * group
        hopper = _hopper_kernel()
        if (
            hopper is not None
            and seen_end is None
            and lse is None
            and (max_rows is None or max_rows > SHORT)
            and hopper.unavailable(qkv, kv_cache, params, metadata.block_size) is None
        ):
            hopper.prefill_attention_hopper(qkv, kv_cache, metadata, params, out, min_query_len)
            return
        tiles = choose_tiles(params.head_dim, qkv.dtype, max_rows)
    pack = min(group, tiles.rows)
    tokens = tiles.rows // pack
    parts = cdiv(group, pack)
    num_blocks = metadata.num_tokens // tokens + metadata.num_requests
    scale = params.scale * params.k_scale * LOG2_E
    soft_cap = params.soft_cap * LOG2_E
    if params.soft_cap > 0:
        scale = 2.0 * scale / params.soft_cap
    options: dict[str, Any] = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **launch_options()}
    _prefill_kernel[(num_blocks, params.num_kv_heads * parts)](
        qkv,
        out,
        kv_cache,
        metadata.query_start,
        metadata.seq_lens,
        metadata.rows,
        metadata.block_table,
        params.sinks if params.sinks is not None else out,
        params.alibi_slopes if params.alibi_slopes is not None else out,
        seen_end if seen_end is not None else out,
        lse if lse is not None else out,
        metadata.num_requests,
        qkv.stride(0),
        out.stride(0),
        metadata.block_table.stride(0),
        kv_cache.stride(0),
        scale,
        soft_cap,
        params.v_scale,
        min_query_len,
        0 if params.deterministic or not params.causal or seen_end is not None else metadata.short_tokens,
        NUM_KV_HEADS=params.num_kv_heads,
        GROUP=group,
        PACK=pack,
        HEAD_DIM=params.head_dim,
        BLOCK_D=max(16, next_power_of_2(params.head_dim)),
        PAGE=metadata.block_size,
        WINDOW=params.window,
        SOFT_CAP=params.soft_cap > 0,
        ALIBI=params.alibi_slopes is not None,
        SINKS=params.sinks is not None,
        TILE_M=tiles.rows,
        TILE_S=tiles.keys,
        CAUSAL=params.causal,
        CHUNK=params.chunk,
        ITEMS=seen_end is not None,
        LSE=lse is not None,
        PAGE_STRIDE=0 if kv_cache.stride(1) == kv_cache[0, 0].numel() else kv_cache.stride(1),
        **options,
    )
