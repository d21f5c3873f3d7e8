"""The tensors behind the pages: allocation, copies between pages, and the host's copy of swapped-out ones.

Knows pages and tensors. Knows nothing of requests, or of what a page holds.
"""

import torch

from quire.attention.interface import AttentionBackend
from quire.attention.paged import zeroed
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind


class PageStore:
    """`KVCacheConfig.num_tensors` tensors of pages on the device, and as many on the host if pages may be swapped.

    The j-th layer of every group lives in tensor j, or the j-th few do. Host tensors are touched only where pages are swapped to.
    Where all layers are alike a tensor is the backend's own; otherwise it is bytes, [pages, page bytes], of which attention
    layers get views and recurrent ones the whole.
    """

    def __init__(self, kv_cache: KVCacheConfig, backend: AttentionBackend, device: torch.device) -> None:
        self._kv_cache = kv_cache
        self._backend = backend
        self._page_dimension = backend.page_dimension if kv_cache.is_uniform else 0
        self.tensors = self._allocate(kv_cache.num_blocks, device)
        self._cross = self._allocate_cross(device)
        self.host_tensors = self._allocate(kv_cache.num_host_blocks, torch.device("cpu"))

    def _allocate(self, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
        kv_cache = self._kv_cache
        if num_blocks == 0:
            return []
        if kv_cache.is_uniform:
            spec = kv_cache.groups[0].spec
            return [self._backend.allocate(spec, num_blocks, device) for _ in range(kv_cache.num_tensors)]
        sizes = (kv_cache.tensor_page_bytes(tensor) for tensor in range(kv_cache.num_tensors))
        return [zeroed((num_blocks, size), torch.uint8, device) for size in sizes]

    def _allocate_cross(self, device: torch.device) -> list[torch.Tensor]:
        """Pages of what stands beside prompts, which are neither copied nor swapped: whoever needs it again has it read again."""
        cross, count = self._kv_cache.cross, self._kv_cache.num_cross_blocks
        if cross is None:
            return []
        specs = (cross.spec_of(index) for index in range(len(cross.layers)))
        return [self._backend.allocate(spec, count, device) for spec in specs]

    def by_layer(self) -> tuple[list[torch.Tensor], list[int]]:
        """Each layer's pages, and each layer's group; that of cross attention is the last."""
        cross = self._kv_cache.cross
        layers_beside = () if cross is None else cross.layers
        num_layers = sum(len(group.layers) for group in self._kv_cache.groups) + len(layers_beside)
        tensors: list[torch.Tensor] = [torch.empty(0)] * num_layers
        group_of_layer = [0] * num_layers
        for number, group in enumerate(self._kv_cache.groups):
            for index, layer in enumerate(group.layers if self.tensors else ()):
                tensor, start = self.tensors[index // group.per_tensor], group.start_of(index)
                tensors[layer] = self._shaped(tensor[:, start:] if start else tensor, group.spec_of(index))
                group_of_layer[layer] = number
        for layer, tensor in zip(layers_beside, self._cross, strict=False):
            tensors[layer], group_of_layer[layer] = tensor, len(self._kv_cache.groups)
        return tensors, group_of_layer

    def _shaped(self, tensor: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
        if spec.kind is KVKind.RECURRENT:
            return tensor
        if not self._kv_cache.is_uniform:
            return self._backend.view(tensor, spec)
        first = self._kv_cache.groups[0].spec
        if (spec.num_kv_heads, spec.head_dim) == (first.num_kv_heads, first.head_dim):
            return tensor
        return self._backend.reshaped(tensor, spec)

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """(device page, host page)."""
        self._move(self.tensors, self.host_tensors, pairs)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """(host page, device page)."""
        self._move(self.host_tensors, self.tensors, pairs)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors) // self._kv_cache.num_blocks

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """Copies of pages (numbers on the device), of all tensors, as bytes [pages, page bytes] on the device."""
        parts = [
            tensor.index_select(self._page_dimension, pages).movedim(self._page_dimension, 0) for tensor in self.tensors
        ]
        return torch.cat([part.reshape(len(pages), -1).view(torch.uint8) for part in parts], dim=1)

    def write(self, pages: torch.Tensor, data: torch.Tensor) -> None:
        """Fill pages with what `read` gave for as many."""
        start, dimension = 0, self._page_dimension
        for tensor in self.tensors:
            like = tensor.movedim(dimension, 0)[: len(pages)]
            end = start + like.nbytes // len(pages)
            part = data[:, start:end].contiguous().view(tensor.dtype).view(like.shape).movedim(0, dimension)
            tensor.index_copy_(dimension, pages, part)
            start = end

    def num_bytes(self) -> int:
        """Device bytes of all pages."""
        return sum(tensor.nbytes for tensor in (*self.tensors, *self._cross))

    def _move(self, sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        dimension = self._page_dimension
        source_pages = torch.tensor([pair[0] for pair in pairs])
        target_pages = torch.tensor([pair[1] for pair in pairs])
        for source, target in zip(sources, targets, strict=True):
            pages = source.index_select(dimension, source_pages.to(source.device))
            target.index_copy_(dimension, target_pages.to(target.device), pages.to(target.device))
