"""The device's attention backend: its own layout of pages, [P, S, 2, K, H], in which a token's keys and values lie side by side.

It serves plain causal layers, with or without windows, and says no to all others: those get the next backend of the platform's
list.

Legend: T tokens, N query heads, K KV heads, H head size, P pages, S tokens a page, Q queries of a request, L its keys.
"""

from typing import Any

import torch

from quire.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams, AttentionRequest, Supports
from quire.config.kv_spec import KVCacheSpec
from quire.kernels.attention import kept_slots, rotate
from quire.kernels.norm import rms


class NpuBackend(AttentionBackend):
    """One request after another."""

    name = "npu"
    page_dimension = 0

    @classmethod
    def supports(cls, request: AttentionRequest) -> Supports:
        refused = {
            "latent pages": request.kind != "full",
            "soft caps": request.soft_cap > 0,
            "sinks": request.has_sinks,
            "slopes": request.has_alibi,
            "chunks": request.chunk > 0,
            "layers that see what follows": not request.causal,
            "heads that share KV heads unevenly": request.num_heads % max(request.num_kv_heads, 1) > 0,
        }
        reasons = [name for name, is_asked in refused.items() if is_asked]
        return Supports(not reasons, f"no kernel for {', '.join(reasons)}" if reasons else "the device's own kernel")

    def allocate(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> torch.Tensor:
        return self.view(torch.zeros((num_blocks, spec.page_bytes), dtype=torch.uint8, device=device), spec)

    def view(self, raw: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
        values = raw.view(getattr(torch, spec.dtype))
        shape = (len(values), spec.block_size, 2, spec.num_kv_heads, spec.head_dim)
        head, token = spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
        return values.as_strided(shape, (values.stride(0), token, token // 2, head, 1))

    def reshaped(self, pages: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
        return pages.view(len(pages), -1, 2, spec.num_kv_heads, spec.head_dim)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        rope: Any,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        tokens, n, k = len(qkv), params.num_heads, params.num_kv_heads
        heads_TCH = qkv.view(tokens, n + 2 * k, params.head_dim)
        queries, keys, values = heads_TCH.float().split((n, k, k), dim=1)
        if q_norm is not None and k_norm is not None:
            queries, keys = rms(queries, q_norm, eps), rms(keys, k_norm, eps)
        if rope is not None:
            angles = rope.cos_sin[metadata.positions[:tokens].long()]
            queries, keys = rotate(queries, angles, rope), rotate(keys, angles, rope)
        heads_TCH[:, :n].copy_(queries)
        if k:
            kept, pages, places = kept_slots(metadata, tokens)
            kv_cache[pages, places] = torch.stack((keys[kept], values[kept]), dim=1).to(kv_cache.dtype)

    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
        rows, size = metadata.rows.tolist(), metadata.block_size
        for number in range(metadata.num_requests):
            begin, end, length = starts[number], starts[number + 1], lengths[number]
            if begin == end:
                continue
            pages = metadata.block_table[rows[number], : -(-length // size)].long()
            kv_L2KH = kv_cache[pages].flatten(0, 1)[:length].float()
            out[begin:end] = _attend(qkv[begin:end], kv_L2KH, params).to(out.dtype)


def _attend(qkv_QC: torch.Tensor, kv_L2KH: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """One request."""
    count, length, group = len(qkv_QC), len(kv_L2KH), params.num_heads // params.num_kv_heads
    q_QKGH = qkv_QC[:, : params.num_heads * params.head_dim].float().view(count, -1, group, params.head_dim)
    scores_KGQL = torch.einsum("qkgh,lkh->kgql", q_QKGH, kv_L2KH[:, 0]) * params.scale
    distance_QL = torch.arange(length - count, length)[:, None] - torch.arange(length)
    hidden_QL = distance_QL < 0
    if params.window > 0:
        hidden_QL |= distance_QL >= params.window
    weights_KGQL = scores_KGQL.masked_fill(hidden_QL.to(qkv_QC.device), float("-inf")).softmax(dim=-1)
    # A hidden key may be in a page that was given to somebody else: zero times what stands there must be zero.
    values_LKH = kv_L2KH[:, 1].nan_to_num() if params.window > 0 else kv_L2KH[:, 1]
    return torch.einsum("kgql,lkh->qkgh", weights_KGQL, values_LKH).flatten(1)
