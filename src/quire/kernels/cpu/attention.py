"""Attention over pages on the native library: tensors become pointers, and that is all.

The cache is bfloat16, float16 or float32; everything else float32.
"""

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.cpu import arguments as native
from quire.kernels.cpu.binding import address, cpu_kernel, dtype_number, float_address, rows_address, run
from quire.kernels.types import Rope

MAX_HEAD_DIM = 1024


def _pages(kv_cache: torch.Tensor) -> tuple[int, int, int]:
    """The address of pages [2, P, K, S, H], and the strides of planes and pages."""
    if kv_cache.device.type != "cpu" or not kv_cache[0, 0].is_contiguous():
        raise ValueError(
            f"a page must be contiguous and on the CPU; it is on {kv_cache.device}, strides {kv_cache.stride()}"
        )
    return kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.stride(1)


@cpu_kernel("rope_and_cache")
def rope_and_cache(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: Rope | None,
    q_norm_H: torch.Tensor | None = None,
    k_norm_H: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; the CPU kernels take at most {MAX_HEAD_DIM}")
    pages, plane_stride, page_stride = _pages(kv_cache)
    cos_sin = None if rope is None else rope.cos_sin
    call = native.RopeArguments(
        rows_address(qkv_TC, "qkv"),
        pages,
        address(metadata.slot_mapping, torch.int64, "slot_mapping"),
        address(metadata.positions, torch.int32, "positions"),
        float_address(cos_sin, "cos_sin"),
        float_address(q_norm_H, "q_norm"),
        float_address(k_norm_H, "k_norm"),
        plane_stride,
        page_stride,
        qkv_TC.stride(0),
        metadata.block_size,
        num_heads,
        num_kv_heads,
        head_dim,
        0 if rope is None else rope.rotary_dim,
        0 if rope is None else int(rope.interleaved),
        dtype_number(kv_cache.dtype, "the KV cache"),
        eps,
    )
    tensors = (qkv_TC, kv_cache, metadata.slot_mapping, metadata.positions, cos_sin, q_norm_H, k_norm_H)
    run("rope_and_cache", call, qkv_TC.shape[0], *tensors)


@cpu_kernel("paged_attention")
def paged_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TNH: torch.Tensor,
    lse_TN: torch.Tensor | None = None,
) -> None:
    pages, plane_stride, page_stride = _pages(kv_cache)
    seen_end = metadata.seen_end if params.sees_items else None
    call = native.AttentionArguments(
        rows_address(qkv_TC, "qkv"),
        pages,
        float_address(out_TNH, "out"),
        address(metadata.query_start, torch.int32, "query_start"),
        address(metadata.seq_lens, torch.int32, "seq_lens"),
        address(metadata.rows, torch.int32, "rows"),
        address(metadata.block_table, torch.int32, "block_table"),
        address(metadata.shape, torch.int64, "shape"),
        float_address(params.sinks, "sinks"),
        float_address(params.alibi_slopes, "alibi_slopes"),
        None if seen_end is None else address(seen_end, torch.int32, "seen_end"),
        float_address(lse_TN, "lse"),
        plane_stride,
        page_stride,
        qkv_TC.stride(0),
        metadata.block_size,
        metadata.block_table.stride(0),
        params.num_heads,
        params.num_kv_heads,
        params.head_dim,
        params.value_dim,
        params.window,
        int(params.causal),
        params.chunk,
        dtype_number(kv_cache.dtype, "the KV cache"),
        params.scale,
        params.soft_cap,
    )
    tensors = (
        qkv_TC,
        kv_cache,
        out_TNH,
        metadata.query_start,
        metadata.seq_lens,
        metadata.rows,
        metadata.block_table,
        metadata.shape,
        params.sinks,
        params.alibi_slopes,
        seen_end,
        lse_TN,
    )
    run("paged_attention", call, qkv_TC.shape[0], *tensors)
