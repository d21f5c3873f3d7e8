"""Backends that go through the kernel registry: pages in the built-in layout, written and read by `kernels.ops`."""

import math

import numpy as np
import torch

from quire.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams
from quire.config.kv_spec import KVCacheSpec
from quire.kernels import ops

CACHE_LINE = 64
"""Bytes; pages start at a line's beginning."""


class PagedBackend(AttentionBackend):
    """Pages as [2, P, K, S, H]: keys, then values; a page holds S tokens of K heads."""

    def allocate(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> torch.Tensor:
        shape = (2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # The host's zero pages: memory is taken where pages are used, not gigabytes of it at the start.
        num_bytes = math.prod(shape) * dtype.itemsize
        raw = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
        start = -raw.ctypes.data % CACHE_LINE
        return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        rope: ops.Rope | None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        ops.rope_and_cache(
            qkv,
            kv_cache,
            metadata,
            params.num_heads,
            params.num_kv_heads,
            params.head_dim,
            rope,
            q_norm,
            k_norm,
            eps,
        )

    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        ops.paged_attention(qkv, kv_cache, metadata, params, out)
