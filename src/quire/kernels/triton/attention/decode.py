"""Attention of requests that compute one token, or a few behind a long context: how the kernel is cut up and launched.

`decode_kernel` says what the kernel does. Knows shapes and the device's size; nothing of why a step looks as it does.
"""

import dataclasses

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.triton.attention.decode_kernel import decode_kernel
from quire.kernels.triton.launch import arrivals, launch_options, next_power_of_2, num_processors, per_queue
from quire.kernels.types import Rope

EARLY_KEYS = 64
"""Stretches up to this length are brought into L2 before the projection's output is there: those of a step of one or few
short requests, which wait for little else. Longer ones gain nothing."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a launch is cut up.

    Attributes:
        tile: keys of a tile.
        programs: programs a multiprocessor holds at once; as many are launched, since each takes an equal stretch.
        max_registers: a thread's, where the compiler's own choice would let fewer programs in.
    """

    tile: int
    num_warps: int = 2
    num_stages: int = 3
    programs: int = 4
    max_registers: int | None = None


SHORT_ROWS = 64
"""Rows (tokens times heads of a KV head) of a query tile, where a request computes a few tokens."""


def choose_shape(head_dim: int, group: int, itemsize: int, short: bool = False) -> Shape:
    """Two warps, 8 KiB of keys a tile and four programs a multiprocessor, as measured on an H200 for heads of 128; more
    warps where many query heads share a KV head, or for tiles of queries."""
    if short:
        return Shape(max(16, min(64, 16384 // (next_power_of_2(head_dim) * itemsize))), num_warps=4, programs=2)
    tile = max(16, min(64, 8192 // (next_power_of_2(head_dim) * itemsize)))
    if group > 16:
        return Shape(tile, num_warps=4, programs=2)
    if itemsize == 1:
        return Shape(tile, num_warps=4, max_registers=128)
    return Shape(tile)


@per_queue
def _parts(device: torch.device, rows: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where programs leave parts of heads: sums of values [rows, H]; peak and sum of the softmax [rows, 2]."""
    acc = torch.zeros(rows, head_dim, dtype=torch.float32, device=device)
    return acc, torch.zeros(rows, 2, dtype=torch.float32, device=device)


def decode_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TC: torch.Tensor,
) -> None:
    """Attention of the requests that compute one token; others are skipped. Their keys and values are in the pages."""
    _launch(qkv_TC, kv_cache, metadata, params, out_TC, False, None, None, None, 0.0)


def fused_decode_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TC: torch.Tensor,
    rope: Rope | None,
    q_norm_H: torch.Tensor | None = None,
    k_norm_H: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """`rope_and_cache`, then `decode_attention`, for a step whose requests all compute one token. `qkv_TC` stays as it is."""
    _launch(qkv_TC, kv_cache, metadata, params, out_TC, True, rope, q_norm_H, k_norm_H, eps)


def short_query_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TC: torch.Tensor,
) -> None:
    """Attention of the causal requests that compute 2 to `metadata.short_tokens` tokens behind a long context; others are
    skipped. Their keys and values are in the pages."""
    _launch(qkv_TC, kv_cache, metadata, params, out_TC, False, None, None, None, 0.0, short=True)


def _launch(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TC: torch.Tensor,
    fused: bool,
    rope: Rope | None,
    q_norm_H: torch.Tensor | None,
    k_norm_H: torch.Tensor | None,
    eps: float,
    *,
    short: bool = False,
    shape: Shape | None = None,
    min_share: int = 1,
    early_keys: int = EARLY_KEYS,
) -> None:
    if not metadata.num_requests:
        return
    k, h = params.num_kv_heads, params.head_dim
    group = params.num_heads // k
    is_fp8 = kv_cache.dtype == torch.float8_e4m3fn
    # A product on the matrix units goes over at least 16 values, and float8 is read in pairs.
    group_pad, head_pad = next_power_of_2(group), max(32 if is_fp8 else 16, next_power_of_2(h))
    has_norm = q_norm_H is not None and k_norm_H is not None
    shape = shape or choose_shape(h, group, kv_cache.dtype.itemsize, short)
    tokens = max(1, SHORT_ROWS // group_pad) if short else 1
    rows, rows_pad = (tokens * group_pad, tokens * group_pad) if short else (group, group_pad)
    query_tiles = metadata.num_requests + (metadata.num_tokens // tokens if short else 0)
    programs = num_processors() * shape.programs
    parts_acc, parts_softmax = _parts(qkv_TC.device, programs * 2 * rows, h)
    decode_kernel[(programs,)](
        qkv_TC,
        kv_cache,
        kv_cache.view(torch.int16) if is_fp8 else kv_cache,
        out_TC,
        metadata.query_start,
        metadata.seq_lens,
        metadata.rows,
        metadata.block_table,
        metadata.slot_mapping,
        parts_acc,
        parts_softmax,
        arrivals("attention", qkv_TC.device, next_power_of_2(max(4096, query_tiles * k))),
        rope.cos_sin if rope is not None else qkv_TC,
        q_norm_H if has_norm else qkv_TC,
        k_norm_H if has_norm else qkv_TC,
        params.sinks if params.sinks is not None else qkv_TC,
        params.alibi_slopes if params.alibi_slopes is not None else qkv_TC,
        params.scale,
        params.soft_cap,
        params.k_scale if is_fp8 else 1.0,
        params.v_scale if is_fp8 else 1.0,
        eps,
        metadata.num_requests,
        params.sight,
        min_share,
        early_keys,
        metadata.short_tokens if short else 0,
        qkv_TC.stride(0),
        metadata.block_table.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1) // (2 if is_fp8 else 1),
        kv_cache.stride(0) // (2 if is_fp8 else 1),
        K=k,
        G=group,
        G_PAD=group_pad,
        M=max(16, rows_pad),
        H=h,
        H_PAD=head_pad,
        PAGE=metadata.block_size,
        TILE=shape.tile,
        B_PAD=requests_padded(metadata.num_requests),
        PARTS=max(1, 4096 // (rows_pad * head_pad)),
        STAGES=shape.num_stages,
        ROTARY_DIM=rope.rotary_dim if rope is not None else 0,
        INTERLEAVED=rope is not None and rope.interleaved,
        HAS_NORM=has_norm,
        HAS_ROPE=rope is not None,
        HAS_WINDOW=params.window > 0,
        HAS_CAP=params.soft_cap > 0,
        HAS_ALIBI=params.alibi_slopes is not None,
        HAS_SINKS=params.sinks is not None,
        PAIRED=is_fp8,
        FUSED=fused,
        CHUNK=params.chunk,
        SHORT=short,
        TOKENS=tokens,
        num_warps=shape.num_warps,
        maxnreg=shape.max_registers,
        **launch_options(),
    )


def requests_padded(num_requests: int) -> int:
    """How many requests a program looks at: few different numbers, since each is a kernel to compile."""
    return next((size for size in (16, 256, 1024) if num_requests <= size), next_power_of_2(num_requests))
