"""Attention over pages of latents (multi-head latent attention in its absorbed form): all heads of a token read one key, whose
first R columns are the value too.

A program has a tile of rows, tokens times heads of one request, and walks keys in tiles; each key is brought from memory once
for scores and values. Requests that compute one token have few rows: there several programs share the keys of a request,
and a second kernel puts their parts together (flash decoding, Dao et al. 2023).

A row's bits depend on how keys are shared out, so the deterministic form never shares them.

Legend: N heads, R columns of a value, E columns of a key behind them, M rows of a tile, S keys of a tile.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.triton.attention.prefill import LOG2_E, find_request
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, num_processors, per_queue

MAX_SPLITS = 64


@triton.jit(do_not_specialize=["num_requests", "min_query_len"])
def _latent_attention(
    q,
    cache,
    out,
    query_start,
    seq_lens,
    rows,
    block_table,
    parts_acc,
    parts_softmax,
    lse,
    num_requests,
    min_query_len,
    q_stride,
    out_stride,
    table_stride,
    page_stride,
    scale,
    v_scale,
    N: tl.constexpr,
    PACK: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_S: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    CAUSAL: tl.constexpr = True,
    LSE: tl.constexpr = False,
):
    """DECODE: program_id(0) is a request, and only those with one token are served. SPLIT: programs along axis 2 share the
    keys and leave parts. LSE: the logarithm of each softmax's denominator is wanted."""
    await_previous(PDL)
    TOKENS: tl.constexpr = 1 if DECODE else TILE_M // PACK
    first_token = 0
    if DECODE:
        request = tl.program_id(0)
        query_begin = tl.load(query_start + request)
        query_len = tl.load(query_start + request + 1) - query_begin
        if query_len != 1:
            return
    else:
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        request = find_request(query_start, num_requests, block, TOKENS)
        query_begin = tl.load(query_start + request)
        query_len = tl.load(query_start + request + 1) - query_begin
        first_token = (block - (query_begin // TOKENS + request)) * TOKENS
        if first_token >= query_len or query_len < min_query_len:
            return
    seq_len = tl.load(seq_lens + request)
    pages = block_table + tl.load(rows + request).to(tl.int64) * table_stride

    m, dim_R, dim_E, offset_S = tl.arange(0, TILE_M), tl.arange(0, R_PAD), tl.arange(0, E_PAD), tl.arange(0, TILE_S)
    token_M, head_M = first_token + m // PACK, tl.program_id(1) * PACK + m % PACK
    real_M = (token_M < query_len) & (m < TOKENS * PACK) & (head_M < N)
    row_M1 = (query_begin + token_M).to(tl.int64)[:, None]
    q_M1 = q + row_M1 * q_stride + (head_M * (R + E))[:, None]
    q_MR = tl.load(q_M1 + dim_R[None, :], mask=real_M[:, None] & (dim_R < R)[None, :], other=0.0)
    q_ME = tl.load(q_M1 + R + dim_E[None, :], mask=real_M[:, None] & (dim_E < E)[None, :], other=0.0)

    first_position = seq_len - query_len + first_token
    position_M = first_position + m // PACK
    begin, end = 0, seq_len
    if CAUSAL:
        end = tl.minimum(first_position + TOKENS, seq_len)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end, TILE_S), tl.num_programs(2)) * TILE_S
        begin = tl.program_id(2) * share
        end = tl.minimum(begin + share, end)
    peak_M = tl.full((TILE_M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((TILE_M,), tl.float32)
    acc_MR = tl.zeros((TILE_M, R_PAD), tl.float32)
    for start in range(begin, end, TILE_S):
        k_position_S = start + offset_S
        inside_S = k_position_S < end
        page_S = tl.load(pages + k_position_S // PAGE, mask=inside_S, other=0).to(tl.int64)
        key_S1 = cache + (page_S * page_stride + (k_position_S % PAGE) * (R + E))[:, None]
        k_SR = tl.load(key_S1 + dim_R[None, :], mask=inside_S[:, None] & (dim_R < R)[None, :], other=0.0).to(q_MR.dtype)
        k_SE = tl.load(key_S1 + R + dim_E[None, :], mask=inside_S[:, None] & (dim_E < E)[None, :], other=0.0).to(
            q_MR.dtype
        )
        score_MS = tl.dot(q_MR, tl.trans(k_SR), input_precision="ieee")
        score_MS = tl.dot(q_ME, tl.trans(k_SE), score_MS, input_precision="ieee") * scale
        visible_MS = inside_S[None, :] & real_M[:, None]
        if CAUSAL:
            visible_MS &= k_position_S[None, :] <= position_M[:, None]
        score_MS = tl.where(visible_MS, score_MS, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(score_MS, 1))
        pivot_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
        weight_MS = tl.exp2(score_MS - pivot_M[:, None])
        decay_M = tl.exp2(peak_M - pivot_M)
        sum_M = sum_M * decay_M + tl.sum(weight_MS, 1)
        acc_MR = tl.dot(weight_MS.to(q_MR.dtype), k_SR, acc_MR * decay_M[:, None], input_precision="ieee")
        peak_M = new_peak_M

    if SPLIT:
        place = (request * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
        part_M = place.to(tl.int64) * TILE_M + m
        tl.store(parts_softmax + part_M * 2, peak_M, mask=real_M)
        tl.store(parts_softmax + part_M * 2 + 1, sum_M, mask=real_M)
        tl.store(
            parts_acc + (part_M * R)[:, None] + dim_R[None, :], acc_MR, mask=real_M[:, None] & (dim_R < R)[None, :]
        )
    else:
        result_MR = acc_MR * (v_scale / tl.where(sum_M == 0.0, 1.0, sum_M))[:, None]
        tl.store(
            out + row_M1 * out_stride + (head_M * R)[:, None] + dim_R[None, :],
            result_MR.to(out.dtype.element_ty),
            mask=real_M[:, None] & (dim_R < R)[None, :],
        )
        if LSE:
            lse_M = (peak_M + tl.log2(tl.where(sum_M == 0.0, 1.0, sum_M))) * 0.6931471805599453
            tl.store(lse + (query_begin + token_M).to(tl.int64) * N + head_M, lse_M, mask=real_M)


@triton.jit(do_not_specialize=["num_parts"])
def _join_parts(
    out,
    query_start,
    parts_acc,
    parts_softmax,
    lse,
    num_parts,
    out_stride,
    v_scale,
    PACK: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    PDL: tl.constexpr,
    LSE: tl.constexpr = False,
):
    """One head of one request that computes one token: its parts, in order."""
    await_previous(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + request)
    if tl.load(query_start + request + 1) - token != 1:
        return
    dim_R = tl.arange(0, R_PAD)
    first = (request * tl.cdiv(tl.num_programs(1), PACK) + head // PACK) * num_parts
    peak, total, acc_R = float("-inf"), 0.0, tl.zeros((R_PAD,), tl.float32)
    for number in range(num_parts):
        part = (first + number).to(tl.int64) * TILE_M + head % PACK
        part_peak, part_sum = tl.load(parts_softmax + part * 2), tl.load(parts_softmax + part * 2 + 1)
        part_R = tl.load(parts_acc + part * R + dim_R, mask=dim_R < R, other=0.0)
        new_peak = tl.maximum(peak, part_peak)
        pivot = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight, decay = tl.exp2(part_peak - pivot), tl.exp2(peak - pivot)
        acc_R, total, peak = acc_R * decay + part_R * weight, total * decay + part_sum * weight, new_peak
    divisor = tl.where(total == 0.0, 1.0, total)
    result_R = acc_R * (v_scale / divisor)
    if LSE:
        tl.store(lse + token.to(tl.int64) * tl.num_programs(1) + head, (peak + tl.log2(divisor)) * 0.6931471805599453)
    tl.store(
        out + token.to(tl.int64) * out_stride + head * R + dim_R, result_R.to(out.dtype.element_ty), mask=dim_R < R
    )


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows and keys of a tile, and how a program runs."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 2


def choose_tiles(rank: int, num_rows: int, itemsize: int) -> Tiles:
    """Tiles whose sums of values stay in registers (at most 128 a thread) and whose keys, twice, in shared memory.

    Args:
        num_rows: that a request can have.
    """
    if itemsize == 4:
        return Tiles(16, 16, 4)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return Tiles(rows, 32 if rank > 256 else 64, 4 if rows < 64 else 8)


@per_queue
def _parts(device: torch.device, rows: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where programs leave parts: sums of values [rows, R]; peak and sum of the softmax [rows, 2]."""
    acc = torch.zeros(rows, rank, dtype=torch.float32, device=device)
    return acc, torch.zeros(rows, 2, dtype=torch.float32, device=device)


def latent_attention(
    q_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TC: torch.Tensor,
    lse_TN: torch.Tensor | None = None,
) -> None:
    """Attention over pages of latents.

    Args:
        lse_TN: float32; gets the logarithms of the softmaxes' denominators.
        q_TC: [T, N * (R + E)].
        kv_cache: [2, pages, 1, page size, R + E].
        out_TC: [T, N * R]; rows beyond the step's tokens are left as they are.
    """
    if metadata.num_tokens == 0:
        return
    if params.deterministic:
        _launch(q_TC, kv_cache, metadata, params, out_TC, lse_TN, decode=False, min_query_len=1)
        return
    _launch(q_TC, kv_cache, metadata, params, out_TC, lse_TN, decode=True, min_query_len=1)
    if metadata.max_query_len != 1:
        _launch(q_TC, kv_cache, metadata, params, out_TC, lse_TN, decode=False, min_query_len=2)


def _launch(
    q_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TC: torch.Tensor,
    lse_TN: torch.Tensor | None,
    *,
    decode: bool,
    min_query_len: int,
) -> None:
    heads, rank, tail = params.num_heads, params.latent, params.head_dim - params.latent
    longest = 1 if decode else 64 if params.deterministic else metadata.max_query_len
    tiles = choose_tiles(rank, heads * longest, q_TC.element_size())
    pack = min(heads, tiles.rows)
    parts = cdiv(heads, pack)
    blocks = metadata.num_requests if decode else metadata.num_tokens // (tiles.rows // pack) + metadata.num_requests
    splits = 1
    if decode:
        splits = max(1, min(num_processors() // (blocks * parts), MAX_SPLITS, cdiv(metadata.max_seq_len, tiles.keys)))
    acc, softmax = _parts(q_TC.device, num_processors() * tiles.rows, rank)
    _latent_attention[(blocks, parts, splits)](
        q_TC,
        kv_cache,
        out_TC,
        metadata.query_start,
        metadata.seq_lens,
        metadata.rows,
        metadata.block_table,
        acc,
        softmax,
        lse_TN if lse_TN is not None else softmax,
        metadata.num_requests,
        min_query_len,
        q_TC.stride(0),
        out_TC.stride(0),
        metadata.block_table.stride(0),
        kv_cache.stride(1),
        params.scale * params.k_scale * LOG2_E,
        params.k_scale,
        N=heads,
        PACK=pack,
        R=rank,
        R_PAD=max(16, next_power_of_2(rank)),
        E=tail,
        E_PAD=max(16, next_power_of_2(tail)),
        PAGE=metadata.block_size,
        TILE_M=tiles.rows,
        TILE_S=tiles.keys,
        DECODE=decode,
        SPLIT=splits > 1,
        CAUSAL=params.causal,
        LSE=lse_TN is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(),
    )
    if splits > 1:
        _join_parts[(metadata.num_requests, heads)](
            out_TC,
            metadata.query_start,
            acc,
            softmax,
            lse_TN if lse_TN is not None else softmax,
            splits,
            out_TC.stride(0),
            params.k_scale,
            PACK=pack,
            R=rank,
            R_PAD=next_power_of_2(rank),
            TILE_M=tiles.rows,
            LSE=lse_TN is not None,
            num_warps=4,
            **launch_options(),
        )
