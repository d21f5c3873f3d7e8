"""Backends that stand around another one: its kernels, over a part of what a step or a context consists of."""

from typing import Any

import torch
from torch import Tensor

from quire.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams, AttentionRequest, Supports
from quire.attention.paged import PagedBackend
from quire.config.kv_spec import KVCacheSpec


class AroundBackend(AttentionBackend):
    """What all of them have in common: `keep` says what becomes of keys and values.

    Args:
        inner: computes.
    """

    def __init__(self, inner: PagedBackend) -> None:
        self._inner = inner

    @classmethod
    def supports(cls, request: AttentionRequest) -> Supports:
        return Supports(False, "it is put around another backend")

    def _spec(self, spec: KVCacheSpec) -> KVCacheSpec:
        """A layer's cache as the inner backend sees it."""
        return spec

    def allocate(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> Tensor:
        return self._inner.allocate(self._spec(spec), num_blocks, device)

    def view(self, raw: Tensor, spec: KVCacheSpec) -> Tensor:
        return self._inner.view(raw, self._spec(spec))

    def reshaped(self, pages: Tensor, spec: KVCacheSpec) -> Tensor:
        return self._inner.reshaped(pages, self._spec(spec))

    def rope_and_cache(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        rope: Any,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        def write(pages: Tensor, described: AttentionMetadata) -> None:
            self._inner.rope_and_cache(qkv, pages, described, params, rope, q_norm, k_norm, eps)

        if self._leaves(params):
            write(kv_cache, metadata)
        else:
            self.keep(write, kv_cache, metadata)

    def _leaves(self, params: AttentionParams) -> bool:
        """Whether a layer is the inner backend's alone."""
        return False


def planes_of(pages: Tensor) -> Tensor:
    """Pages without a second plane that is the first one again, as bytes where their numbers have one: to be read and written by
    slots."""
    pages = pages[:1] if pages.stride(0) == 0 else pages
    return pages.view(torch.uint8) if pages.itemsize == 1 else pages
