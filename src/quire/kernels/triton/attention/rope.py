"""Norms of heads, rotary embedding and the cache's slots: what comes between the qkv projection and attention.

Knows the layout of pages [2, P, K, S, H] and of qkv rows [T, (N + 2K) * H]. Knows nothing of attention.
Legend: T tokens, N query heads, K KV heads, H head size, R values that rotate, S tokens a page, B heads of one program.
"""

import torch
import triton
import triton.language as tl

from quire.attention.interface import AttentionMetadata
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, is_nvidia, launch_options, next_power_of_2
from quire.kernels.types import Rope

VALUES_PER_PROGRAM = 4096
"""Of one token's heads: all 32 of 128 values in one program are faster than parts of them, for few tokens and for many."""

FP8_MAX = tl.constexpr(448.0)
"""The largest value of float8 e4m3."""

PORTABLE = tl.constexpr(not is_nvidia())
"""Whether kernels are plain Triton, without NVIDIA's assembly."""


@triton.jit
def rotary_partner(dim, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each value of a head: the value that it turns with (itself beyond R), the pair's number, and its sine's sign."""
    if INTERLEAVED:
        partner = dim ^ 1
        pair = dim // 2
        sign = tl.where(dim % 2 == 0, -1.0, 1.0)
    else:
        HALF: tl.constexpr = ROTARY_DIM // 2
        is_first = dim < HALF
        partner = tl.where(is_first, dim + HALF, dim - HALF)
        pair = tl.where(is_first, dim, dim - HALF)
        sign = tl.where(is_first, -1.0, 1.0)
    return tl.where(dim < ROTARY_DIM, partner, dim), pair, sign


@triton.jit
def load_cos_sin(cos_sin, position, dim, pair, sign, ROTARY_DIM: tl.constexpr, mask):
    """Each value's cosine and signed sine at `position`; 1 and 0 where nothing turns."""
    turned = mask & (dim < ROTARY_DIM)
    row = cos_sin + position.to(tl.int64) * ROTARY_DIM
    cos = tl.load(row + pair, mask=turned, other=1.0)
    sin = tl.load(row + ROTARY_DIM // 2 + pair, mask=turned, other=0.0)
    return cos, sin * sign


@triton.jit
def norm_and_rotate(
    x_BH,
    partner_BH,
    weight,
    partner_weight,
    cos,
    sin,
    eps,
    H: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    """RMS-norm heads and rotate them, in float32; `partner_BH` holds, value by value, what x_BH turns with."""
    if HAS_NORM:
        scale_B1 = tl.rsqrt(tl.sum(x_BH * x_BH, axis=1) / H + eps)[:, None]
        x_BH = x_BH * scale_B1 * weight
        partner_BH = partner_BH * scale_B1 * partner_weight
    if HAS_ROPE:
        x_BH = x_BH * cos + partner_BH * sin
    return x_BH


@triton.jit
def to_cache_type(x, inverse_scale, dtype: tl.constexpr):
    """As the pages hold it: divided by the scale and saturated where they are fp8."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x * inverse_scale, -FP8_MAX), FP8_MAX)
    return x.to(dtype)


@triton.jit
def _rope_and_cache(
    qkv,
    cache,
    slots,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    inverse_k_scale,
    inverse_v_scale,
    qkv_stride,
    page_stride,
    value_offset,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's heads `BLOCK * program_id(1)` and on: queries turn in place, keys and values go to their slot."""
    token = tl.program_id(0).to(tl.int64)
    head_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim_H = tl.arange(0, H_PAD)
    partner_H, pair_H, sign_H = rotary_partner(dim_H, ROTARY_DIM, INTERLEAVED)
    in_head_1H = (dim_H < H)[None, :]
    is_query_B1, is_value_B1 = (head_B < N)[:, None], (head_B >= N + K)[:, None]
    weight_BH, partner_weight_BH = 1.0, 1.0
    if HAS_NORM:
        has_H = dim_H < H
        weight_BH = tl.where(
            is_query_B1, tl.load(q_norm + dim_H, mask=has_H)[None, :], tl.load(k_norm + dim_H, mask=has_H)[None, :]
        )
        partner_weight_BH = tl.where(
            is_query_B1,
            tl.load(q_norm + partner_H, mask=has_H)[None, :],
            tl.load(k_norm + partner_H, mask=has_H)[None, :],
        )
    await_previous(PDL)
    slot = tl.load(slots + token)
    mask_BH = (head_B < N + 2 * K)[:, None] & in_head_1H
    row_B1 = qkv + token * qkv_stride + (head_B * H)[:, None]
    raw_BH = tl.load(row_B1 + dim_H[None, :], mask=mask_BH, other=0.0)
    x_BH = raw_BH.to(tl.float32)
    partner_BH, cos_1H, sin_1H = x_BH, 1.0, 0.0
    if HAS_ROPE:
        turned_BH = mask_BH & ~is_value_B1 & (dim_H < ROTARY_DIM)[None, :]
        partner_BH = tl.load(row_B1 + partner_H[None, :], mask=turned_BH, other=0.0).to(tl.float32)
        cos_H, sin_H = load_cos_sin(cos_sin, tl.load(positions + token), dim_H, pair_H, sign_H, ROTARY_DIM, True)
        cos_1H, sin_1H = cos_H[None, :], sin_H[None, :]
        # Queries are overwritten where another thread reads them as partners.
        tl.debug_barrier()
    turned_BH = norm_and_rotate(
        x_BH, partner_BH, weight_BH, partner_weight_BH, cos_1H, sin_1H, eps, H, HAS_NORM, HAS_ROPE
    )
    tl.store(row_B1 + dim_H[None, :], turned_BH.to(qkv.dtype.element_ty), mask=mask_BH & is_query_B1)
    kv_head_B = tl.where(head_B >= N + K, head_B - N - K, head_B - N)
    side_B = tl.where(head_B >= N + K, value_offset, 0).to(tl.int64)
    target_B1 = (side_B + (slot // PAGE) * page_stride + (slot % PAGE) * H + kv_head_B * (PAGE * H))[:, None]
    inverse_B1 = tl.where(is_value_B1, inverse_v_scale, inverse_k_scale)
    kept_BH = to_cache_type(tl.where(is_value_B1, x_BH, turned_BH), inverse_B1, cache.dtype.element_ty)
    tl.store(cache + target_B1 + dim_H[None, :], kept_BH, mask=mask_BH & ~is_query_B1 & (slot >= 0))


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
    """`ops.rope_and_cache`, and scales: pages in fp8 hold keys and values divided by them."""
    heads = num_heads + 2 * num_kv_heads
    head_pad = next_power_of_2(head_dim)
    block = min(VALUES_PER_PROGRAM // head_pad, next_power_of_2(heads))
    has_norm = q_norm_H is not None and k_norm_H is not None
    _rope_and_cache[(qkv_TC.shape[0], cdiv(heads, block))](
        qkv_TC,
        kv_cache,
        metadata.slot_mapping,
        metadata.positions,
        rope.cos_sin if rope is not None else qkv_TC,
        q_norm_H if has_norm else qkv_TC,
        k_norm_H if has_norm else qkv_TC,
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        qkv_TC.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(0),
        N=num_heads,
        K=num_kv_heads,
        H=head_dim,
        H_PAD=head_pad,
        PAGE=metadata.block_size,
        BLOCK=block,
        ROTARY_DIM=rope.rotary_dim if rope is not None else 0,
        INTERLEAVED=rope is not None and rope.interleaved,
        HAS_NORM=has_norm,
        HAS_ROPE=rope is not None,
        num_warps=4 if block * head_pad > 512 else 2,
        **launch_options(),
    )


kernel("rope_and_cache", platform="cuda", priority=10)(rope_and_cache)
