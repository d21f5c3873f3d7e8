"""Attention over pages on a GPU: requests that compute one token, or a few behind many, by one kernel, the others by another;
latents by a third.

Knows how a step is divided. Knows nothing of how either kernel works.
"""

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.registry import kernel
from quire.kernels.triton.attention.decode import decode_attention, short_query_attention
from quire.kernels.triton.attention.latent_attention import latent_attention
from quire.kernels.triton.attention.prefill import prefill_attention


@kernel("paged_attention", platform="cuda", priority=10)
def paged_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TNH: torch.Tensor,
    lse_TN: torch.Tensor | None = None,
) -> None:
    """`ops.paged_attention`. The deterministic form leaves every token to the prefill kernel, whose tiles of keys do not
    depend on how many queries there are: a token's bits are the same alone, in any batch and in any chunk of its prompt.
    Of these two that one alone gives logarithms of denominators."""
    if params.latent:
        latent_attention(qkv_TC, kv_cache, metadata, params, out_TNH, lse_TN)
        return
    if params.deterministic or lse_TN is not None:
        prefill_attention(qkv_TC, kv_cache, metadata, params, out_TNH, 1, lse=lse_TN)
        return
    if metadata.decodes:
        decode_attention(qkv_TC, kv_cache, metadata, params, out_TNH)
    sees_items = params.sees_items and metadata.seen_end is not None
    if metadata.short_tokens and params.causal and not sees_items:
        short_query_attention(qkv_TC, kv_cache, metadata, params, out_TNH)
    if metadata.max_query_len != 1:
        prefill_attention(qkv_TC, kv_cache, metadata, params, out_TNH, 2)
