"""Attention of prompts over pages on Hopper, the warps that compute, and the kernel that they and the loading warp are.

Two groups of four warps, 64 rows each, take turns at the tensor cores: while one is in its softmax the other multiplies.
Within a group, the scores of the next tile of keys are multiplied before the weights of this one are applied (Shah et al.,
FlashAttention-3). Programs stay and take tile after tile, so that the next one's loads begin before the last one's end.

Written in Gluon, Triton's dialect with layouts and barriers in the open. How a row's bits stay its own: see
`prefill_attention.py`, whose promises hold here too.

Legend: N query heads, K KV heads, H head size, M rows of a group of warps (tokens times heads of a KV head), S keys of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.triton.attention.hopper_load import Batch, Desk, Layer, Ring, load, told
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait


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
    begin,
    end,
    first_tile,
    n,
    acc_MH,
    weight_MS,
    max_M,
    sum_M,
    position_M,
    q_smem,
    ring,
    scale,
    soft_cap,
    MASKED: gl.constexpr,
    score_layout: gl.constexpr,
    layer,
):
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
def _places(
    GROUP_OF_WARPS: gl.constexpr,
    kv_head,
    part,
    query_begin,
    query_len,
    first_token,
    stride,
    layout: gl.constexpr,
    layer,
):
    """Where the rows of a group of warps lie in a matrix of tokens, and which of them exist."""
    m = GROUP_OF_WARPS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, layer.HEAD_DIM, layout=gl.SliceLayout(0, layout))
    token_M = first_token + m // layer.PACK
    group_head_M = part * layer.PACK + m % layer.PACK
    real_M = (token_M < query_len) & (m < layer.TOKENS * layer.PACK) & (group_head_M < layer.GROUP)
    column_M = (kv_head * layer.GROUP + group_head_M) * layer.HEAD_DIM
    at_MH = ((query_begin + token_M).to(gl.int64) * stride + column_M)[:, None] + d[None, :]
    return at_MH, real_M[:, None]


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
    desk,
    scale,
    soft_cap,
    v_scale,
    layer,
):
    """A group of four computing warps: 64 rows of every tile."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, layer.TILE_S, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, layer.HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    # Rows of the head size, 16 bytes a thread.
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // layer.HEAD_DIM, layer.HEAD_DIM // 8], [4, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n = 0
    count = 0
    more = gl.to_tensor(1)
    while more > 0:
        slot = count % layer.SLOTS
        mbarrier.wait(desk.full.index(slot), (count // layer.SLOTS) & 1)
        num_tiles = told(desk, slot * 8, one)
        more = num_tiles
        if num_tiles > 0:
            kv_head = told(desk, slot * 8 + 1, one)
            part = told(desk, slot * 8 + 2, one)
            query_begin = told(desk, slot * 8 + 3, one)
            query_len = told(desk, slot * 8 + 4, one)
            seq_len = told(desk, slot * 8 + 5, one)
            first_token = told(desk, slot * 8 + 6, one)
            first_tile = told(desk, slot * 8 + 7, one)
            first_position = seq_len - query_len + first_token
            last_position = gl.minimum(first_position + layer.TOKENS, seq_len) - 1
            q_smem = q_all.index(slot * 2 + GROUP_OF_WARPS)
            if not layer.COPY_QUERIES:
                at_MH, real_MH = _places(
                    GROUP_OF_WARPS, kv_head, part, query_begin, query_len, first_token, qkv_stride, io_layout, layer
                )
                q_smem.store(gl.load(qkv + at_MH, mask=real_MH, other=0.0))
                fence_async_shared()
                gl.thread_barrier()

            m = GROUP_OF_WARPS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout))
            position_M = first_position + m // layer.PACK
            if layer.SINKS:
                head_M = kv_head * layer.GROUP + gl.minimum(part * layer.PACK + m % layer.PACK, layer.GROUP - 1)
                max_M = gl.load(sinks + head_M).to(gl.float32) * 1.4426950408889634
                sum_M = gl.full_like(max_M, 1.0)
            else:
                max_M = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, score_layout))
                sum_M = gl.full_like(max_M, 0.0)
            acc_MH = gl.zeros([64, layer.HEAD_DIM], gl.float32, layout=acc_layout)

            score_MS = warpgroup_mma_wait(0, deps=[_multiply_scores(q_smem, ring, n, score_layout, layer)])
            mbarrier.arrive(ring.k_empty.index(n % layer.STAGES))
            new_weight_MS, _decay_M, max_M, sum_M = _soften(
                score_MS, max_M, sum_M, position_M, first_tile * layer.TILE_S, scale, soft_cap, True, layer
            )
            weight_MS = gl.convert_layout(new_weight_MS.to(qkv.dtype.element_ty), weight_layout)

            begin = 1
            full_end = gl.maximum((first_position + 1) // layer.TILE_S - first_tile, 1)
            if layer.WINDOW > 0:
                # Pages that were passed before this step may be another's by now.
                oldest = seq_len - query_len - layer.WINDOW + 1
                if first_tile * layer.TILE_S < oldest:
                    stage = n % layer.STAGES
                    mbarrier.wait(ring.v_full.index(stage), (n // layer.STAGES) & 1)
                    _clear_outside(ring.v.index(stage), first_tile * layer.TILE_S, oldest, seq_len, io_layout)
                begin = gl.maximum(last_position - layer.WINDOW + 1, 0) + layer.TILE_S - 1
                begin = gl.minimum(gl.maximum(begin // layer.TILE_S - first_tile, 1), full_end)
                acc_MH, weight_MS, max_M, sum_M = _steps(
                    1,
                    begin,
                    first_tile,
                    n,
                    acc_MH,
                    weight_MS,
                    max_M,
                    sum_M,
                    position_M,
                    q_smem,
                    ring,
                    scale,
                    soft_cap,
                    True,
                    score_layout,
                    layer,
                )
            acc_MH, weight_MS, max_M, sum_M = _steps(
                begin,
                full_end,
                first_tile,
                n,
                acc_MH,
                weight_MS,
                max_M,
                sum_M,
                position_M,
                q_smem,
                ring,
                scale,
                soft_cap,
                False,
                score_layout,
                layer,
            )
            acc_MH, weight_MS, max_M, sum_M = _steps(
                full_end,
                num_tiles,
                first_tile,
                n,
                acc_MH,
                weight_MS,
                max_M,
                sum_M,
                position_M,
                q_smem,
                ring,
                scale,
                soft_cap,
                True,
                score_layout,
                layer,
            )
            n += num_tiles
            stage = (n - 1) % layer.STAGES
            mbarrier.wait(ring.v_full.index(stage), ((n - 1) // layer.STAGES) & 1)
            last_key = (first_tile + num_tiles - 1) * layer.TILE_S
            if last_key + layer.TILE_S > seq_len:
                _clear_outside(ring.v.index(stage), last_key, 0, seq_len, io_layout)
            acc_MH = warpgroup_mma(weight_MS, ring.v.index(stage), acc_MH, is_async=True)
            acc_MH = warpgroup_mma_wait(0, deps=[acc_MH])
            mbarrier.arrive(ring.v_empty.index(stage))

            factor_M = v_scale / gl.where(sum_M == 0.0, 1.0, sum_M)
            acc_MH = acc_MH * gl.convert_layout(factor_M, gl.SliceLayout(1, acc_layout))[:, None]
            # By way of shared memory, so that a thread writes 16 bytes.
            q_smem.store(acc_MH.to(qkv.dtype.element_ty))
            gl.thread_barrier()
            to_MH, exists_MH = _places(
                GROUP_OF_WARPS, kv_head, part, query_begin, query_len, first_token, out_stride, io_layout, layer
            )
            gl.store(out + to_MH, q_smem.load(io_layout), mask=exists_MH)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(desk.empty.index(slot))
            count += 1


@gluon.jit(do_not_specialize=["num_requests", "min_query_len", "short_tokens"])
def prefill_kernel(
    kv_desc,
    q_desc,
    qkv,
    out,
    query_start,
    seq_lens,
    rows,
    block_table,
    sinks,
    tickets,
    num_requests,
    qkv_stride,
    out_stride,
    block_table_stride,
    v_row,
    scale,
    soft_cap,
    v_scale,
    min_query_len,
    short_tokens,
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
    SLOTS: gl.constexpr,
    COPY_QUERIES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    layer = Layer(
        NUM_KV_HEADS, GROUP, PACK, HEAD_DIM, PAGE, WINDOW, SOFT_CAP, SINKS, TILE_S, STAGES, SLOTS, COPY_QUERIES
    )
    batch = Batch(query_start, seq_lens, rows, num_requests, min_query_len, short_tokens, tickets)
    dtype: gl.constexpr = qkv.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PIECE: gl.constexpr = min(PAGE, TILE_S)
    PIECES: gl.constexpr = TILE_S // PIECE * (HEAD_DIM // 64)
    if COPY_QUERIES:
        q_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        q_panels = gl.allocate_shared_memory(dtype, [SLOTS * 2 * (HEAD_DIM // 64), 64 // PACK, PACK, 64], q_layout)
        q_smem = q_panels._reinterpret(dtype, [SLOTS * 2, 64, HEAD_DIM], layout)
    else:
        q_panels = gl.allocate_shared_memory(dtype, [SLOTS * 2, 64, HEAD_DIM], layout)
        q_smem = q_panels
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
    desk = Desk(
        gl.allocate_shared_memory(gl.int32, [SLOTS * 8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(SLOTS):
        mbarrier.init(desk.full.index(i), count=1)
        mbarrier.init(desk.empty.index(i), count=2)
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
                (first, qkv, qkv_stride, out, out_stride, sinks, q_smem, ring, desk, scale, soft_cap, v_scale, layer),
            ),
            (
                _attend,
                (second, qkv, qkv_stride, out, out_stride, sinks, q_smem, ring, desk, scale, soft_cap, v_scale, layer),
            ),
            (
                load,
                (
                    kv_desc,
                    q_desc,
                    k_panels,
                    v_panels,
                    q_panels,
                    ring,
                    desk,
                    block_table,
                    block_table_stride,
                    v_row,
                    batch,
                    layer,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
