"""The Triton backend: attention over pages on a GPU, with the kernels of `kernels/triton`.

Knows which kernels a step needs. Knows nothing of how they work.
"""

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest, Supports
from quire.attention.paged import PagedBackend
from quire.kernels.types import Rope

MAX_HEAD_DIM = 256
MAX_GROUP = 128
"""Query heads of one KV head: all of them stand in one tile."""
MAX_LATENT = 512
PAGE_MULTIPLE = 16
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KV_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn)


class TritonBackend(PagedBackend):
    """Decode by split keys, prefill by tiles of queries, which the registry chose; decode-only steps norm, rotate, write and
    attend in one kernel."""

    name = "triton"

    @classmethod
    def supports(cls, request: AttentionRequest) -> Supports:
        why = _why_not(request)
        return Supports(why is None, why or "Triton kernels")

    def attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
        rope: Rope | None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        from quire.kernels.triton.attention.decode import fused_decode_attention

        is_by_token = rope is not None and rope.is_by_token  # the fused kernel turns by a request's length
        if metadata.max_query_len == 1 and not params.deterministic and not is_by_token:
            fused_decode_attention(qkv, kv_cache, metadata, params, out, rope, q_norm, k_norm, eps)
        else:
            super().attend(qkv, kv_cache, metadata, params, out, rope, q_norm, k_norm, eps)


def _why_not(request: AttentionRequest) -> str | None:
    """Why the kernels cannot serve such a layer; None if they can."""
    why = _why_not_latent(request) if request.kind == "mla" else _why_not_heads(request)
    if why is not None:
        return why
    if request.block_size % PAGE_MULTIPLE or request.block_size & (request.block_size - 1):
        return f"pages of {request.block_size} tokens: use a power of two from {PAGE_MULTIPLE}"
    if request.kv_dtype not in KV_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_DTYPES)
        return f"pages of {request.kv_dtype} are none of {names}"
    if request.kind not in ("full", "mla"):
        return f"attention of kind {request.kind!r} has no kernel"
    return None


def _why_not_heads(request: AttentionRequest) -> str | None:
    group, rest = divmod(request.num_heads, request.num_kv_heads)
    if rest:
        return f"{request.num_heads} heads do not share {request.num_kv_heads} KV heads evenly"
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head; the kernels take at most {MAX_GROUP}"
    if request.head_dim > MAX_HEAD_DIM or request.head_dim % 8:
        return f"head_dim {request.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if request.chunk > 0 and not request.causal:
        return "chunks in a layer that is not causal have no kernel"
    return None


def _why_not_latent(request: AttentionRequest) -> str | None:
    if request.latent > MAX_LATENT:
        return f"a latent of {request.latent} values; the kernel takes at most {MAX_LATENT}"
    has_more = request.window or request.chunk or request.soft_cap or request.has_sinks or request.has_alibi
    if has_more or not request.causal or request.num_kv_heads != 1:
        return "latents are only attended causally, without windows, chunks, caps, sinks or slopes"
    return None
