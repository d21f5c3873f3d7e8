"""The tensors behind the pages: allocation, copies between pages, and the host's copy of swapped-out ones.

Knows pages and tensors. Knows nothing of requests, or of what a page holds.
"""

import torch

from quire.attention.interface import AttentionBackend
from quire.config.kv_spec import KVCacheConfig
from quire.errors import ConfigError

PAGE_DIMENSION = 1
"""Where the page id stands in a backend's layout [2, pages, ...]."""


class PageStore:
    """`KVCacheConfig.num_tensors` tensors of pages on the device, and as many on the host if pages may be swapped.

    The j-th layer of every group lives in tensor j. Host tensors are touched only where pages are swapped to.

    Raises:
        ConfigError: groups with pages of different sizes, which cannot share a pool.
    """

    def __init__(self, kv_cache: KVCacheConfig, backend: AttentionBackend, device: torch.device) -> None:
        sizes = {group.spec.page_bytes for group in kv_cache.groups}
        if len(sizes) > 1:
            raise ConfigError(
                f"layers keep pages of {' and '.join(str(size) for size in sorted(sizes))} bytes, which cannot share one "
                "pool of pages: use a model whose layers keep equally much of each token"
            )
        largest = max(kv_cache.groups, key=lambda group: len(group.layers))
        self.tensors = [backend.allocate(largest.spec, kv_cache.num_blocks, device) for _ in largest.layers]
        self.host_tensors = [
            backend.allocate(largest.spec, kv_cache.num_host_blocks, torch.device("cpu"))
            for _ in (largest.layers if kv_cache.num_host_blocks else ())
        ]
        self._largest = largest
        self._kv_cache = kv_cache

    def by_layer(self) -> tuple[list[torch.Tensor], list[int]]:
        """Each layer's pages, and each layer's group."""
        num_layers = 1 + max(layer for group in self._kv_cache.groups for layer in group.layers)
        tensors: list[torch.Tensor] = [torch.empty(0)] * num_layers
        group_of_layer = [0] * num_layers
        for number, group in enumerate(self._kv_cache.groups):
            for tensor, layer in zip(self.tensors, group.layers, strict=False):
                tensors[layer] = self._shaped(tensor, group.spec.num_kv_heads, group.spec.head_dim)
                group_of_layer[layer] = number
        return tensors, group_of_layer

    def _shaped(self, tensor: torch.Tensor, num_kv_heads: int, head_dim: int) -> torch.Tensor:
        spec = self._largest.spec
        if (num_kv_heads, head_dim) == (spec.num_kv_heads, spec.head_dim):
            return tensor
        return tensor.view(2, tensor.shape[PAGE_DIMENSION], num_kv_heads, -1, head_dim)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to) within the device."""
        self._move(self.tensors, self.tensors, pairs)

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """(device page, host page)."""
        self._move(self.tensors, self.host_tensors, pairs)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """(host page, device page)."""
        self._move(self.host_tensors, self.tensors, pairs)

    def num_bytes(self) -> int:
        """Device bytes of all pages."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @staticmethod
    def _move(sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source_pages = torch.tensor([pair[0] for pair in pairs])
        target_pages = torch.tensor([pair[1] for pair in pairs])
        for source, target in zip(sources, targets, strict=True):
            pages = source.index_select(PAGE_DIMENSION, source_pages.to(source.device))
            target.index_copy_(PAGE_DIMENSION, target_pages.to(target.device), pages.to(target.device))
