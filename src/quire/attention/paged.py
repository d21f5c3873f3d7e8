"""Backends that go through the kernel registry: pages in the built-in layout, written and read by `kernels.ops`."""

import math

import numpy as np
import torch

from quire.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams
from quire.config.kv_spec import CACHE_LINE, KVCacheSpec, KVKind
from quire.kernels import ops
from quire.kernels.types import Rope
from quire.platforms.interface import is_host_memory


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU they are the host's zero pages: memory is taken where it is used, not gigabytes of it at the start."""
    if not is_host_memory(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


class PagedBackend(AttentionBackend):
    """Pages as [2, P, K, S, H]: keys, then values; a page holds S tokens of K heads. Where layers of other kinds share the
    memory, a page's keys and values lie side by side, so the first two dimensions have strides of their own."""

    def allocate(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> torch.Tensor:
        if spec.kind is KVKind.MLA:
            return self.view(zeroed((num_blocks, spec.page_bytes), torch.uint8, device), spec)
        shape = (2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        return zeroed(shape, getattr(torch, spec.dtype), device)

    def view(self, raw: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
        pages = raw.view(getattr(torch, spec.dtype))
        head = spec.block_size * spec.head_dim
        plane = 0 if spec.kind is KVKind.MLA else spec.num_kv_heads * head
        shape = (2, pages.shape[0], spec.num_kv_heads, spec.block_size, spec.head_dim)
        return pages.as_strided(shape, (plane, pages.stride(0), head, spec.head_dim, 1))

    def reshaped(self, pages: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
        return pages.view(2, pages.shape[1], spec.num_kv_heads, -1, spec.head_dim)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        rope: Rope | None,
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
            params.k_scale,
            params.v_scale,
        )

    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """`lse`, float32 [T, N], gets what attention over parts of a context is merged by."""
        ops.paged_attention(qkv, kv_cache, metadata, params, out, lse)
