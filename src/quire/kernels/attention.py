"""Attention over pages of keys and values, and what comes before it.

Legend: T tokens, N query heads, K KV heads, H head size, C columns of a row of q, k and v, P pages, S tokens a page.
"""

import torch
from torch import Tensor

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.norm import rms
from quire.kernels.registry import operation
from quire.kernels.types import Rope


def rotate(x_TNH: Tensor, cos_sin_TR: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of the first `rotary_dim` values of each head (Su et al., RoFormer)."""
    cos, sin = (part[:, None, :] for part in cos_sin_TR.chunk(2, dim=-1))
    head, rest = x_TNH[..., : rope.rotary_dim], x_TNH[..., rope.rotary_dim :]
    if rope.interleaved:
        a, b = head[..., ::2], head[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = head.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def to_cache(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Values as pages have them: in float8 divided by the scale, and the nearest to what it cannot hold."""
    return (x / scale).clamp(-448.0, 448.0).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def kept_slots(metadata: AttentionMetadata, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the step's tokens are written to pages [T], and the page and the place in it of each of those."""
    slots = metadata.slot_mapping[:tokens]
    kept = slots >= 0
    return kept, slots[kept] // metadata.block_size, slots[kept] % metadata.block_size


@operation
def rope_and_cache(
    qkv_TC: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: Rope | None,
    q_norm_H: Tensor | None = None,
    k_norm_H: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """What comes between the qkv projection and attention, for each token: RMS-norm of every query and key head (if
    weights are given), rotary embedding at its position (if any), keys and values written to its slot of the cache.
    Queries change in place; C = (N + 2K) * H. The cache is [2, P, K, S, H] in its own dtype; in float8 it holds keys and values
    divided by their scales, which kernels without float8 are not given. Slots below 0 are skipped."""
    tokens = qkv_TC.shape[0]
    heads = qkv_TC.view(tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.float().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm_H is not None and k_norm_H is not None:
        q, k = rms(q, q_norm_H, eps), rms(k, k_norm_H, eps)
    if rope is not None:
        cos_sin = rope.cos_sin[metadata.positions[:tokens].long()]
        q, k = rotate(q, cos_sin, rope), rotate(k, cos_sin, rope)
    heads[:, :num_heads].copy_(q)
    if not num_kv_heads:
        return
    kept, pages, offsets = kept_slots(metadata, tokens)
    kv_cache[0, pages, :, offsets] = to_cache(k[kept], k_scale, kv_cache.dtype)
    kv_cache[1, pages, :, offsets] = to_cache(v[kept], v_scale, kv_cache.dtype)


def _hidden(
    q_position: Tensor, k_position: Tensor, params: AttentionParams, seen_end_Q: Tensor | None = None
) -> Tensor:
    """Which keys a query does not see."""
    distance = q_position - k_position
    if params.causal:
        hidden = distance < 0
        if seen_end_Q is not None and params.sees_items:
            seen_end_L = torch.nn.functional.pad(seen_end_Q, (k_position.shape[1] - len(seen_end_Q), 0))
            hidden &= (k_position >= seen_end_Q[:, None]) | (seen_end_L != seen_end_Q[:, None])
        if params.window > 0:
            hidden |= distance >= params.window
    else:
        hidden = distance.abs() > (params.window // 2 if params.window > 0 else distance.numel())
    if params.chunk > 0:
        hidden |= q_position // params.chunk != k_position // params.chunk
    return hidden


@operation
def paged_attention(
    qkv_TC: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TNH: Tensor,
    lse_TN: Tensor | None = None,
) -> None:
    """Attention of the queries in the first N * H columns of `qkv` [T, ..] over pages, prefill and decode in one call. The
    cache is [2, P, K, S, H], whose planes and pages may have any stride: of 0 between planes, keys are values. `lse` gets the
    logarithm of each softmax's denominator in float32: what parts of a context are merged by."""
    n, kv_heads, h = params.num_heads, params.num_kv_heads, params.head_dim
    size, is_scaled = metadata.block_size, kv_cache.dtype == torch.float8_e4m3fn
    k_scale, v_scale = (params.k_scale, params.v_scale) if is_scaled else (1.0, 1.0)
    for b in range(metadata.num_requests):
        start, end = int(metadata.query_start[b]), int(metadata.query_start[b + 1])
        length = int(metadata.seq_lens[b])
        if end == start:
            continue
        pages = metadata.block_table[int(metadata.rows[b]), : (length + size - 1) // size].long()
        k, v = (
            part[pages]
            .transpose(1, 2)
            .reshape(-1, kv_heads, h)[:length]
            .float()
            .repeat_interleave(n // kv_heads, dim=1)
            for part in (kv_cache[0], kv_cache[1])
        )
        q = qkv_TC[start:end, : n * h].reshape(end - start, n, h).float()
        scores_NQL = torch.einsum("qnh,lnh->nql", q, k) * (params.scale * k_scale)
        if params.soft_cap > 0:
            scores_NQL = params.soft_cap * torch.tanh(scores_NQL / params.soft_cap)
        q_position = torch.arange(length - (end - start), length, device=q.device)[:, None]
        k_position = torch.arange(length, device=q.device)[None, :]
        if params.alibi_slopes is not None:
            scores_NQL = scores_NQL + params.alibi_slopes.float()[:, None, None] * (k_position - q_position)
        seen_end_Q = None if metadata.seen_end is None else metadata.seen_end[start:end]
        scores_NQL = scores_NQL.masked_fill(_hidden(q_position, k_position, params, seen_end_Q), float("-inf"))
        if params.sinks is not None:
            sinks = params.sinks.float()[:, None, None].expand(-1, end - start, 1)
            scores_NQL = torch.cat((scores_NQL, sinks), dim=-1)
        if lse_TN is not None:
            lse_TN[start:end] = torch.logsumexp(scores_NQL, dim=-1).T
        weights = torch.softmax(scores_NQL, dim=-1)[..., :length]
        # A hidden position may hold anything (a freed page): its weight is zero, but zero times infinity is not.
        v = v[..., : params.value_dim] * (k_scale if params.latent else v_scale)
        attended = torch.einsum("nql,lnh->qnh", weights, torch.nan_to_num(v) if params.window or params.chunk else v)
        out_TNH[start:end].copy_(attended.flatten(1))
