"""Attention over pages on the native library: tensors become pointers, and that is all.

The cache is bfloat16, float16 or float32; everything else float32.
"""

from typing import Any

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.cpu.binding import Operation, cpu_kernel, dtype_number
from quire.kernels.types import Rope

MAX_HEAD_DIM = 1024


_ROPE = Operation(
    "rope_and_cache",
    "qkv:rows cache:any slot_mapping:long positions:int cos_sin q_norm k_norm",
    longs="plane_stride page_stride qkv_stride block_size",
    ints="num_heads num_kv_heads head_dim rotary_dim interleaved dtype",
    floats="eps",
)
_ATTENTION = Operation(
    "paged_attention",
    "qkv:rows cache:any out query_start:int seq_lens:int table_rows:int block_table:int shape:long sinks alibi_slopes"
    " seen_end:int lse",
    longs="plane_stride page_stride qkv_stride block_size block_table_stride",
    ints="num_heads num_kv_heads head_dim value_dim window causal chunk dtype",
    floats="scale soft_cap",
)


def _pages(kv_cache: torch.Tensor, metadata: AttentionMetadata) -> dict[str, Any]:
    """The arguments that tell of pages [2, P, K, S, H]."""
    if kv_cache.device.type != "cpu" or not kv_cache[0, 0].is_contiguous():
        raise ValueError(
            f"a page must be contiguous and on the CPU; it is on {kv_cache.device}, strides {kv_cache.stride()}"
        )
    strides = {"plane_stride": kv_cache.stride(0), "page_stride": kv_cache.stride(1)}
    dtype = dtype_number(kv_cache.dtype, "the KV cache")
    return {"cache": kv_cache, **strides, "block_size": metadata.block_size, "dtype": dtype}


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
    turned = {} if rope is None else {"rotary_dim": rope.rotary_dim, "interleaved": rope.interleaved}
    _ROPE(
        len(qkv_TC),
        qkv=qkv_TC,
        **_pages(kv_cache, metadata),
        slot_mapping=metadata.slot_mapping,
        positions=metadata.positions,
        cos_sin=None if rope is None else rope.cos_sin,
        q_norm=q_norm_H,
        k_norm=k_norm_H,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        **turned,
        eps=eps,
    )


@cpu_kernel("paged_attention")
def paged_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TNH: torch.Tensor,
    lse_TN: torch.Tensor | None = None,
) -> None:
    _ATTENTION(
        len(qkv_TC),
        qkv=qkv_TC,
        **_pages(kv_cache, metadata),
        out=out_TNH,
        query_start=metadata.query_start,
        seq_lens=metadata.seq_lens,
        table_rows=metadata.rows,
        block_table=metadata.block_table,
        shape=metadata.shape,
        sinks=params.sinks,
        alibi_slopes=params.alibi_slopes,
        seen_end=metadata.seen_end if params.sees_items else None,
        lse=lse_TN,
        block_table_stride=metadata.block_table.stride(0),
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        head_dim=params.head_dim,
        value_dim=params.value_dim,
        window=params.window,
        causal=params.causal,
        chunk=params.chunk,
        scale=params.scale,
        soft_cap=params.soft_cap,
    )
