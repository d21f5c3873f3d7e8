"""Attention over pages, request by request, in plain PyTorch. Pages have the built-in layout [2, pages, K, block size, H].

Legend: T tokens of the step, N query heads, K KV heads, H head size.
"""

from typing import Any

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest, Supports
from quire.attention.paged import PagedBackend


class ElmBackend(PagedBackend):
    """Writes keys and values as `PagedBackend` does, and computes attention by itself."""

    name = "elm"
    only_when_named = True

    @classmethod
    def supports(cls, request: AttentionRequest) -> Supports:
        plain = not (request.window or request.soft_cap or request.has_sinks or request.has_alibi or request.chunk)
        if not (plain and request.causal and request.kind == "full" and not request.latent):
            return Supports(False, "it knows plain causal attention only")
        return Supports(True, "plain causal attention")

    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        size = params.head_dim
        q_TNH = qkv[:, : params.num_heads * size].unflatten(1, (params.num_heads, size))
        for request in range(int(metadata.shape[1])):
            start, end = metadata.query_start[request : request + 2].tolist()
            length = int(metadata.seq_lens[request])
            pages = metadata.block_table[int(metadata.rows[request]), : -(-length // metadata.block_size)]
            k, v = (plane[pages].transpose(0, 1).flatten(1, 2)[:, :length] for plane in kv_cache)
            attended = _attend(q_TNH[start:end], k, v, params.scale, length - (end - start))
            out[start:end] = attended.to(out.dtype).flatten(1)


def _attend(q_TNH: torch.Tensor, k_KLH: Any, v_KLH: Any, scale: float, first: int) -> torch.Tensor:
    """Token t of the queries is token `first + t` of its request, and sees all up to itself."""
    share = q_TNH.shape[1] // k_KLH.shape[0]
    k_NLH, v_NLH = (each.float().repeat_interleave(share, 0) for each in (k_KLH, v_KLH))
    scores_NTL = torch.einsum("tnh,nlh->ntl", q_TNH.float(), k_NLH) * scale
    seen_TL = torch.arange(k_NLH.shape[1]) <= first + torch.arange(len(q_TNH))[:, None]
    scores_NTL = scores_NTL.masked_fill(~seen_TL.to(scores_NTL.device), float("-inf"))
    return torch.einsum("ntl,nlh->tnh", scores_NTL.softmax(-1), v_NLH)
