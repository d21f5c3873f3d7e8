"""Attention of prompts over pages on Hopper: which layers its kernel serves, and how it is launched.

Knows nothing of fp8, ALiBi, chunks, strided pages or head sizes other than those in `HEAD_DIMS`; `unavailable` says so.
"""

import math
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.triton.attention.hopper_kernel import prefill_kernel
from quire.kernels.triton.launch import cdiv, launch_options, num_processors, per_queue

LOG2_E = math.log2(math.e)
HEAD_DIMS = (64, 128, 256)
ROWS = 128
PANEL = 64
"""Columns of a 16-bit matrix that one row of swizzled shared memory (128 bytes) holds."""
PAGE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
QUERY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


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
    if not params.causal or params.chunk > 0:
        return "attention that is not causal, or in chunks"
    if not kv_cache.is_contiguous():
        return "pages that share their memory with layers of another kind"
    if page_size < 16 or page_size & (page_size - 1):
        return f"pages of {page_size} tokens, which is no power of two from 16 on"
    return None


@per_queue
def _tickets(device: torch.device) -> torch.Tensor:
    """Counters that every launch leaves at zero: tiles handed out, programs that have ended."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def _describe(
    base: torch.Tensor, shape: list[int], strides: list[int], block: list[int], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """What the copy engine knows of a matrix. Not by its constructor, whose checks take longer than a launch."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = base, shape, strides
    descriptor.block_shape, descriptor.layout, descriptor.padding = block, layout, "zero"
    return descriptor


def prefill_attention_hopper(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: torch.Tensor,
    min_query_len: int = 2,
) -> None:
    """As `prefill_attention`, for what `unavailable` does not refuse."""
    if metadata.max_query_len < min_query_len or metadata.num_tokens == 0:
        return
    group = params.num_heads // params.num_kv_heads
    pack = min(group, ROWS)
    tokens = ROWS // pack
    parts = cdiv(group, pack)
    most = (metadata.num_tokens // tokens + metadata.num_requests) * params.num_kv_heads * parts
    scale = params.scale * params.k_scale * LOG2_E
    soft_cap = params.soft_cap * LOG2_E
    if params.soft_cap > 0:
        scale = 2.0 * scale / params.soft_cap
    tile_s = tile_keys(params.head_dim)
    piece = min(metadata.block_size, tile_s)
    head_dim = params.head_dim
    num_rows = kv_cache.numel() // head_dim
    kv_desc = _describe(kv_cache, [num_rows, head_dim], [head_dim, 1], [piece, PANEL], PAGE_LAYOUT)
    copy_queries = pack & (pack - 1) == 0 and pack <= 64
    q_desc = None
    if copy_queries:
        num_tokens, num_columns = qkv.shape
        shape, strides = [num_tokens, num_columns // head_dim, head_dim], [qkv.stride(0), head_dim, 1]
        q_desc = _describe(qkv, shape, strides, [64 // pack, pack, PANEL], QUERY_LAYOUT)
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": 168, **launch_options()}
    prefill_kernel[(min(most, num_processors()),)](
        kv_desc,
        q_desc,
        qkv,
        out,
        metadata.query_start,
        metadata.seq_lens,
        metadata.rows,
        metadata.block_table,
        params.sinks if params.sinks is not None else out,
        _tickets(qkv.device),
        metadata.num_requests,
        qkv.stride(0),
        out.stride(0),
        metadata.block_table.stride(0),
        num_rows // 2,
        scale,
        soft_cap,
        params.v_scale,
        min_query_len,
        0 if params.deterministic else metadata.short_tokens,
        NUM_KV_HEADS=params.num_kv_heads,
        GROUP=group,
        PACK=pack,
        HEAD_DIM=params.head_dim,
        PAGE=metadata.block_size,
        WINDOW=params.window,
        SOFT_CAP=params.soft_cap > 0,
        SINKS=params.sinks is not None,
        TILE_S=tile_s,
        STAGES=num_stages(params.head_dim),
        SLOTS=2 if params.head_dim <= 128 else 1,
        COPY_QUERIES=copy_queries,
        **options,
    )
