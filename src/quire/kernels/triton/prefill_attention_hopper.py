"""Attention of prompts over pages on Hopper: `prefill_attention` for the layers and devices where tensor cores must never wait.

One warp only loads: pages of keys and values go to shared memory by the copy engine (TMA), a page's tokens of one KV head
at a time. Two groups of four warps only compute, 64 rows each, and so take turns at the tensor cores: while one is in its
softmax the other multiplies. Within a group, the scores of the next tile are multiplied before the weights of this one are
applied (Shah et al., FlashAttention-3).
Knows nothing of fp8, ALiBi or head sizes other than those in `HEAD_DIMS`; `unavailable` says so.

Legend: T tokens, N query heads, K KV heads, H head size, M rows of a group of warps (tokens times heads of a KV head), S keys
of a tile.
"""

import math
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, launch_options, num_processors

LOG2_E = math.log2(math.e)
HEAD_DIMS = (64, 128, 256)
ROWS = 128
PANEL = 64
"""Columns of a 16-bit matrix that one row of swizzled shared memory (128 bytes) holds."""


@aggregate
class Layer:
    """What is compiled in."""

    NUM_KV_HEADS: gl.constexpr
    GROUP: gl.constexpr
    PACK: gl.constexpr
    PARTS: gl.constexpr
    TOKENS: gl.constexpr
    HEAD_DIM: gl.constexpr
    PAGE: gl.constexpr
    WINDOW: gl.constexpr
    SOFT_CAP: gl.constexpr
    SINKS: gl.constexpr
    TILE_S: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, NUM_KV_HEADS, GROUP, PACK, HEAD_DIM, PAGE, WINDOW, SOFT_CAP, SINKS, TILE_S, STAGES):
        self.NUM_KV_HEADS = gl.constexpr(NUM_KV_HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.PACK = gl.constexpr(PACK)
        self.PARTS = gl.constexpr((GROUP + PACK - 1) // PACK)
        self.TOKENS = gl.constexpr(128 // PACK)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.PAGE = gl.constexpr(PAGE)
        self.WINDOW = gl.constexpr(WINDOW)
        self.SOFT_CAP = gl.constexpr(SOFT_CAP)
        self.SINKS = gl.constexpr(SINKS)
        self.TILE_S = gl.constexpr(TILE_S)
        self.STAGES = gl.constexpr(STAGES)


@aggregate
class Batch:
    """The step's requests, and how many tiles to look at."""

    query_start: gl.tensor
    seq_lens: gl.tensor
    num_requests: gl.tensor
    min_query_len: gl.tensor
    num_blocks: gl.tensor
    num_work: gl.tensor

    @gluon.constexpr_function
    def __init__(self, query_start, seq_lens, num_requests, min_query_len, num_blocks, num_work):
        self.query_start = query_start
        self.seq_lens = seq_lens
        self.num_requests = num_requests
        self.min_query_len = min_query_len
        self.num_blocks = num_blocks
        self.num_work = num_work


@aggregate
class Work:
    """A tile: its head, rows and keys. One that has nothing to do has no keys."""

    kv_head: gl.tensor
    part: gl.tensor
    request: gl.tensor
    query_begin: gl.tensor
    query_len: gl.tensor
    seq_len: gl.tensor
    first_token: gl.tensor
    first_position: gl.tensor
    last_position: gl.tensor
    first_tile: gl.tensor
    num_tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        kv_head,
        part,
        request,
        query_begin,
        query_len,
        seq_len,
        first_token,
        first_position,
        last_position,
        first_tile,
        num_tiles,
    ):
        self.kv_head = kv_head
        self.part = part
        self.request = request
        self.query_begin = query_begin
        self.query_len = query_len
        self.seq_len = seq_len
        self.first_token = first_token
        self.first_position = first_position
        self.last_position = last_position
        self.first_tile = first_tile
        self.num_tiles = num_tiles


@aggregate
class Ring:
    """STAGES tiles of keys and as many of values in shared memory, and who may touch which: `full` when the pages of a tile
    have arrived, `empty` when both groups of warps have read it."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, k_full, k_empty, v_full, v_empty):
        self.k = k
        self.v = v
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty


@gluon.jit
def _locate(turn, batch, layer):
    """Where the rows and keys of this program's next tile are.

    Request b's tiles begin at query_start[b] // TOKENS + b, which is room enough for all. The last tiles of a request have the
    most keys: they go first.
    """
    tile = turn * gl.num_programs(0) + gl.program_id(0)
    head = tile // batch.num_blocks
    block = batch.num_blocks - 1 - tile % batch.num_blocks
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    request = gl.to_tensor(-1)
    for first in range(0, batch.num_requests, 256):
        b = first + gl.arange(0, 256, layout=layout)
        start_B = gl.load(batch.query_start + b, mask=b < batch.num_requests, other=1 << 30)
        request += gl.sum((start_B // layer.TOKENS + b <= block).to(gl.int32), 0)
    query_begin = gl.load(batch.query_start + request)
    query_len = gl.load(batch.query_start + request + 1) - query_begin
    seq_len = gl.load(batch.seq_lens + request)
    first_token = (block - (query_begin // layer.TOKENS + request)) * layer.TOKENS
    first_position = seq_len - query_len + first_token
    last_position = gl.minimum(first_position + layer.TOKENS, seq_len) - 1
    first_tile = gl.to_tensor(0)
    if layer.WINDOW > 0:
        first_tile = gl.maximum(first_position - layer.WINDOW + 1, 0) // layer.TILE_S
    num_tiles = last_position // layer.TILE_S + 1 - first_tile
    if (first_token >= query_len) | (query_len < batch.min_query_len) | (tile >= batch.num_work):
        num_tiles = 0
    return Work(
        head // layer.PARTS,
        head % layer.PARTS,
        request,
        query_begin,
        query_len,
        seq_len,
        first_token,
        first_position,
        last_position,
        first_tile,
        num_tiles,
    )


@gluon.jit
def _load_tile(kv_desc, pages, first_key, last_page, kv_head, first_row, panels, full, stage, layer):
    """One tile of keys, or of values: a page's tokens of one head at a time, into its piece of each panel of 64 columns."""
    PANELS: gl.constexpr = layer.HEAD_DIM // 64
    PIECE: gl.constexpr = min(layer.PAGE, layer.TILE_S)
    PIECES: gl.constexpr = layer.TILE_S // PIECE
    mbarrier.expect(full.index(stage), layer.TILE_S * layer.HEAD_DIM * 2)
    for i in gl.static_range(PIECES):
        key = first_key + i * PIECE
        page = gl.load(pages + gl.minimum(key // layer.PAGE, last_page))
        row = first_row + (page * layer.NUM_KV_HEADS + kv_head) * layer.PAGE + key % layer.PAGE
        for p in gl.static_range(PANELS):
            piece = panels.index((stage * PANELS + p) * PIECES + i)
            tma.async_copy_global_to_shared(kv_desc, [row, p * 64], full.index(stage), piece)


@gluon.jit
def _load(kv_desc, k_panels, v_panels, ring, rows, block_table, block_table_stride, v_row, batch, layer):
    """The loading warp: every tile's keys and values."""
    n = 0
    for turn in range(gl.cdiv(batch.num_work, gl.num_programs(0))):
        work = _locate(turn, batch, layer)
        pages = block_table + gl.load(rows + work.request).to(gl.int64) * block_table_stride
        last_page = work.last_position // layer.PAGE
        for j in range(work.num_tiles):
            stage = n % layer.STAGES
            phase = ((n // layer.STAGES) & 1) ^ 1
            first_key = (work.first_tile + j) * layer.TILE_S
            mbarrier.wait(ring.k_empty.index(stage), phase)
            _load_tile(kv_desc, pages, first_key, last_page, work.kv_head, 0, k_panels, ring.k_full, stage, layer)
            mbarrier.wait(ring.v_empty.index(stage), phase)
            _load_tile(kv_desc, pages, first_key, last_page, work.kv_head, v_row, v_panels, ring.v_full, stage, layer)
            n += 1


@gluon.jit
def _soften(score_MS, max_M, sum_M, position_M, first_key, scale, soft_cap, MASKED: gl.constexpr, layer):
    """One tile's step of the running softmax, in base 2: weights, decay of what came before, new maximum and sum."""
    if layer.SOFT_CAP:
        # cap * tanh(x / cap); `soft_cap` and `scale` come with their factors of log2(e).
        score_MS = soft_cap * (1.0 - 2.0 / (gl.exp2(score_MS * scale) + 1.0))
        scale = 1.0
    if MASKED:
        key_S = first_key + gl.arange(0, layer.TILE_S, layout=gl.SliceLayout(0, score_MS.type.layout))
        visible_MS = key_S[None, :] <= position_M[:, None]
        if layer.WINDOW > 0:
            visible_MS = visible_MS & (key_S[None, :] > position_M[:, None] - layer.WINDOW)
        score_MS = gl.where(visible_MS, score_MS, float("-inf"))
    new_max_M = gl.maximum(max_M, gl.max(score_MS, 1) * scale)
    # A row that has seen nothing yet: its maximum is minus infinity, its weights shall be zero and not NaN.
    pivot_M = gl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED else new_max_M
    zero_MS = gl.full_like(score_MS, 0.0)
    weight_MS = gl.exp2(gl.fma(score_MS, zero_MS + scale, zero_MS - pivot_M[:, None]))
    decay_M = gl.exp2(max_M - pivot_M)
    sum_M = gl.fma(sum_M, decay_M, gl.sum(weight_MS, 1))
    return weight_MS, decay_M, new_max_M, sum_M


@gluon.jit
def _clear_outside(v_smem, first_key, begin, end, layout: gl.constexpr):
    """Zero the values of keys below `begin` and from `end` on: their weight is zero, but pages may hold anything there, and
    zero times infinity is not zero. Both groups of warps do it, and write the same."""
    KEYS: gl.constexpr = 32
    for i in gl.static_range(v_smem.shape[0] // KEYS):
        part = v_smem.slice(i * KEYS, KEYS)
        key_S = first_key + i * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        part.store(gl.where(((key_S >= begin) & (key_S < end))[:, None], part.load(layout), 0.0).to(v_smem.dtype))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _multiply_scores(q_smem, ring, n, score_layout: gl.constexpr, layer):
    """Begin the scores of the n-th tile in the ring."""
    stage = n % layer.STAGES
    mbarrier.wait(ring.k_full.index(stage), (n // layer.STAGES) & 1)
    zero_MS = gl.zeros([64, layer.TILE_S], gl.float32, layout=score_layout)
    return warpgroup_mma(q_smem, ring.k.index(stage).permute((1, 0)), zero_MS, use_acc=False, is_async=True)


@gluon.jit
def _steps(
    begin, end, first_tile, n, acc_MH, weight_MS, max_M, sum_M, position_M, q_smem, ring, scale, soft_cap,
    MASKED: gl.constexpr, score_layout: gl.constexpr, layer,
):  # fmt: skip
    """Scores of tiles begin to end - 1; beside each, the product of the tile before with its values."""
    for j in range(begin, end):
        score_MS = _multiply_scores(q_smem, ring, n + j, score_layout, layer)
        last = (n + j - 1) % layer.STAGES
        mbarrier.wait(ring.v_full.index(last), ((n + j - 1) // layer.STAGES) & 1)
        acc_MH = warpgroup_mma(weight_MS, ring.v.index(last), acc_MH, is_async=True)
        score_MS = warpgroup_mma_wait(1, deps=[score_MS])
        mbarrier.arrive(ring.k_empty.index((n + j) % layer.STAGES))
        new_weight_MS, decay_M, max_M, sum_M = _soften(
            score_MS, max_M, sum_M, position_M, (first_tile + j) * layer.TILE_S, scale, soft_cap, MASKED, layer
        )
        acc_MH = warpgroup_mma_wait(0, deps=[acc_MH])
        mbarrier.arrive(ring.v_empty.index(last))
        acc_MH = acc_MH * gl.convert_layout(decay_M, gl.SliceLayout(1, acc_MH.type.layout))[:, None]
        weight_MS = gl.convert_layout(new_weight_MS.to(weight_MS.dtype), weight_MS.type.layout)
    return acc_MH, weight_MS, max_M, sum_M


@gluon.jit
def _attend(
    GROUP_OF_WARPS: gl.constexpr,
    qkv,
    qkv_stride,
    out,
    out_stride,
    sinks,
    q_all,
    ring,
    scale,
    soft_cap,
    v_scale,
    batch,
    layer,
):
    """A group of four computing warps: 64 rows of every tile."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, layer.TILE_S, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, layer.HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    # Rows of the head size, 16 bytes a thread.
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // layer.HEAD_DIM, layer.HEAD_DIM // 8], [4, 1], [1, 0])
    q_smem = q_all.index(GROUP_OF_WARPS)
    n = 0
    for turn in range(gl.cdiv(batch.num_work, gl.num_programs(0))):
        work = _locate(turn, batch, layer)
        if work.num_tiles > 0:
            m = GROUP_OF_WARPS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, io_layout))
            d = gl.arange(0, layer.HEAD_DIM, layout=gl.SliceLayout(0, io_layout))
            token_M = work.first_token + m // layer.PACK
            group_head_M = work.part * layer.PACK + m % layer.PACK
            real_M = (token_M < work.query_len) & (m < layer.TOKENS * layer.PACK) & (group_head_M < layer.GROUP)
            row_M = (work.query_begin + token_M).to(gl.int64)
            column_M = (work.kv_head * layer.GROUP + group_head_M) * layer.HEAD_DIM
            q_smem.store(
                gl.load(qkv + (row_M * qkv_stride + column_M)[:, None] + d[None, :], mask=real_M[:, None], other=0.0)
            )
            fence_async_shared()
            gl.thread_barrier()

            m = GROUP_OF_WARPS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout))
            position_M = work.first_position + m // layer.PACK
            if layer.SINKS:
                head_M = work.kv_head * layer.GROUP + gl.minimum(
                    work.part * layer.PACK + m % layer.PACK, layer.GROUP - 1
                )
                max_M = gl.load(sinks + head_M).to(gl.float32) * 1.4426950408889634
                sum_M = gl.full_like(max_M, 1.0)
            else:
                max_M = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, score_layout))
                sum_M = gl.full_like(max_M, 0.0)
            acc_MH = gl.zeros([64, layer.HEAD_DIM], gl.float32, layout=acc_layout)

            score_MS = warpgroup_mma_wait(0, deps=[_multiply_scores(q_smem, ring, n, score_layout, layer)])
            mbarrier.arrive(ring.k_empty.index(n % layer.STAGES))
            new_weight_MS, _decay_M, max_M, sum_M = _soften(
                score_MS, max_M, sum_M, position_M, work.first_tile * layer.TILE_S, scale, soft_cap, True, layer
            )
            weight_MS = gl.convert_layout(new_weight_MS.to(qkv.dtype.element_ty), weight_layout)

            begin = 1
            full_end = gl.maximum((work.first_position + 1) // layer.TILE_S - work.first_tile, 1)
            if layer.WINDOW > 0:
                # Pages that were passed before this step may be another's by now.
                oldest = work.seq_len - work.query_len - layer.WINDOW + 1
                if work.first_tile * layer.TILE_S < oldest:
                    stage = n % layer.STAGES
                    mbarrier.wait(ring.v_full.index(stage), (n // layer.STAGES) & 1)
                    _clear_outside(ring.v.index(stage), work.first_tile * layer.TILE_S, oldest, work.seq_len, io_layout)
                begin = gl.maximum(work.last_position - layer.WINDOW + 1, 0) + layer.TILE_S - 1
                begin = gl.minimum(gl.maximum(begin // layer.TILE_S - work.first_tile, 1), full_end)
                acc_MH, weight_MS, max_M, sum_M = _steps(
                    1, begin, work.first_tile, n, acc_MH, weight_MS, max_M, sum_M, position_M,
                    q_smem, ring, scale, soft_cap, True, score_layout, layer,
                )  # fmt: skip
            acc_MH, weight_MS, max_M, sum_M = _steps(
                begin, full_end, work.first_tile, n, acc_MH, weight_MS, max_M, sum_M, position_M,
                q_smem, ring, scale, soft_cap, False, score_layout, layer,
            )  # fmt: skip
            acc_MH, weight_MS, max_M, sum_M = _steps(
                full_end, work.num_tiles, work.first_tile, n, acc_MH, weight_MS, max_M, sum_M, position_M,
                q_smem, ring, scale, soft_cap, True, score_layout, layer,
            )  # fmt: skip
            n += work.num_tiles
            stage = (n - 1) % layer.STAGES
            mbarrier.wait(ring.v_full.index(stage), ((n - 1) // layer.STAGES) & 1)
            last_key = (work.first_tile + work.num_tiles - 1) * layer.TILE_S
            if last_key + layer.TILE_S > work.seq_len:
                _clear_outside(ring.v.index(stage), last_key, 0, work.seq_len, io_layout)
            acc_MH = warpgroup_mma(weight_MS, ring.v.index(stage), acc_MH, is_async=True)
            acc_MH = warpgroup_mma_wait(0, deps=[acc_MH])
            mbarrier.arrive(ring.v_empty.index(stage))

            factor_M = v_scale / gl.where(sum_M == 0.0, 1.0, sum_M)
            acc_MH = acc_MH * gl.convert_layout(factor_M, gl.SliceLayout(1, acc_layout))[:, None]
            # By way of shared memory, so that a thread writes 16 bytes.
            q_smem.store(acc_MH.to(qkv.dtype.element_ty))
            gl.thread_barrier()
            gl.store(
                out + (row_M * out_stride + column_M)[:, None] + d[None, :],
                q_smem.load(io_layout),
                mask=real_M[:, None],
            )
            gl.thread_barrier()


@gluon.jit(do_not_specialize=["num_requests", "num_work", "num_blocks", "min_query_len"])
def _prefill_kernel(
    kv_desc,
    qkv,
    out,
    query_start,
    seq_lens,
    rows,
    block_table,
    sinks,
    num_requests,
    num_work,
    num_blocks,
    qkv_stride,
    out_stride,
    block_table_stride,
    v_row,
    scale,
    soft_cap,
    v_scale,
    min_query_len,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    TILE_S: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    layer = Layer(NUM_KV_HEADS, GROUP, PACK, HEAD_DIM, PAGE, WINDOW, SOFT_CAP, SINKS, TILE_S, STAGES)
    batch = Batch(query_start, seq_lens, num_requests, min_query_len, num_blocks, num_work)
    dtype: gl.constexpr = qkv.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PIECE: gl.constexpr = min(PAGE, TILE_S)
    PIECES: gl.constexpr = TILE_S // PIECE * (HEAD_DIM // 64)
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], layout)
    # A tile lies in shared memory as panels of 64 columns, one after another: a page is a piece of each panel.
    k_panels = gl.allocate_shared_memory(dtype, [STAGES * PIECES, PIECE, 64], layout)
    v_panels = gl.allocate_shared_memory(dtype, [STAGES * PIECES, PIECE, 64], layout)
    ring = Ring(
        k_panels._reinterpret(dtype, [STAGES, TILE_S, HEAD_DIM], layout),
        v_panels._reinterpret(dtype, [STAGES, TILE_S, HEAD_DIM], layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.k_full.index(i), count=1)
        mbarrier.init(ring.v_full.index(i), count=1)
        mbarrier.init(ring.k_empty.index(i), count=2)
        mbarrier.init(ring.v_empty.index(i), count=2)
    fence_async_shared()
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _attend,
                (first, qkv, qkv_stride, out, out_stride, sinks, q_smem, ring, scale, soft_cap, v_scale, batch, layer),
            ),
            (
                _attend,
                (second, qkv, qkv_stride, out, out_stride, sinks, q_smem, ring, scale, soft_cap, v_scale, batch, layer),
            ),
            (_load, (kv_desc, k_panels, v_panels, ring, rows, block_table, block_table_stride, v_row, batch, layer)),
        ],
        [4, 1],
        [240, 24],
    )


def tile_keys(head_dim: int) -> int:
    """Keys of a tile."""
    return 128 if head_dim <= 128 else 64


def num_stages(head_dim: int) -> int:
    """Tiles of keys, and as many of values, in shared memory at a time."""
    return {64: 4, 128: 2, 256: 2}[head_dim]


def unavailable(qkv: torch.Tensor, kv_cache: torch.Tensor, params: AttentionParams, page_size: int) -> str | None:
    """Why this kernel cannot serve a layer, or None."""
    if params.head_dim not in HEAD_DIMS:
        return f"head size {params.head_dim} is none of {HEAD_DIMS}"
    if qkv.dtype not in (torch.bfloat16, torch.float16) or kv_cache.dtype != qkv.dtype:
        return "queries and pages must be of the same 16-bit type"
    if params.alibi_slopes is not None:
        return "ALiBi"
    if page_size % 16:
        return f"pages of {page_size} tokens, which is no multiple of 16"
    return None


def prefill_attention_hopper(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: torch.Tensor,
    min_query_len: int = 2,
    persistent: bool = False,
    stages: int | None = None,
) -> None:
    """As `prefill_attention`, for what `unavailable` does not refuse."""
    if metadata.max_query_len < min_query_len or metadata.num_tokens == 0:
        return
    group = params.num_heads // params.num_kv_heads
    pack = min(group, ROWS)
    tokens = ROWS // pack
    parts = triton.cdiv(group, pack)
    num_blocks = metadata.num_tokens // tokens + metadata.num_requests
    num_work = num_blocks * params.num_kv_heads * parts
    scale = params.scale * params.k_scale * LOG2_E
    soft_cap = params.soft_cap * LOG2_E
    if params.soft_cap > 0:
        scale = 2.0 * scale / params.soft_cap
    tile_s = tile_keys(params.head_dim)
    piece = min(metadata.block_size, tile_s)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat = kv_cache.view(-1, params.head_dim)
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": 168, **launch_options()}
    _prefill_kernel[(min(num_work, num_processors()) if persistent else num_work,)](
        TensorDescriptor.from_tensor(flat, [piece, PANEL], layout),
        qkv,
        out,
        metadata.query_start,
        metadata.seq_lens,
        metadata.rows,
        metadata.block_table,
        params.sinks if params.sinks is not None else out,
        metadata.num_requests,
        num_work,
        num_blocks,
        qkv.stride(0),
        out.stride(0),
        metadata.block_table.stride(0),
        flat.shape[0] // 2,
        scale,
        soft_cap,
        params.v_scale,
        min_query_len,
        NUM_KV_HEADS=params.num_kv_heads,
        GROUP=group,
        PACK=pack,
        HEAD_DIM=params.head_dim,
        PAGE=metadata.block_size,
        WINDOW=params.window,
        SOFT_CAP=params.soft_cap > 0,
        SINKS=params.sinks is not None,
        TILE_S=tile_s,
        STAGES=stages or num_stages(params.head_dim),
        **options,
    )
