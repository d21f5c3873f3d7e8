"""What each layer needs to keep of past tokens, and how layers with equal needs form groups that share one pool of pages.

Knows bytes and tokens. Knows nothing of tensors.
"""

import enum

import msgspec

CACHE_LINE = 64
"""Bytes; pages of different layers begin at a line's beginning."""


class KVKind(enum.StrEnum):
    """How a layer uses its cache."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    MLA = "mla"
    RECURRENT = "recurrent"
    CROSS = "cross"


class KVCacheSpec(msgspec.Struct, frozen=True):
    """One layer's cache.

    Attributes:
        block_size: tokens a page.
        bytes_per_token: keys and values of one token in this layer (for `RECURRENT`, bytes of one state).
        window: tokens that stay visible, for `SLIDING_WINDOW` and `CHUNKED_LOCAL`; 0 means all.
        num_kv_heads, head_dim, dtype: for whoever allocates.
    """

    kind: KVKind
    block_size: int
    bytes_per_token: int
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"
    window: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this layer."""
        return self.bytes_per_token * (1 if self.kind is KVKind.RECURRENT else self.block_size)


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one page table: page id p of the group means page p in each of its layers' tensors."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The result of planning: how many pages there are, and who uses them.

    All groups draw page ids from one pool of `num_blocks`. Memory is `num_tensors` tensors of `num_blocks` pages each;
    the j-th layer of *every* group lives in tensor j, so that a page id is used by exactly one group at a time and no
    byte is reserved twice. Page 0 is the null page: never handed out, and where padding writes go.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    num_host_blocks: int = 0

    @property
    def is_uniform(self) -> bool:
        """Whether all layers keep keys and values, in pages of one size and type; otherwise a tensor's page is bytes, of
        which each layer uses the first so many."""
        specs = [group.spec for group in self.groups]
        alike = {(spec.page_bytes, spec.dtype) for spec in specs}
        return len(alike) == 1 and not any(spec.kind in (KVKind.MLA, KVKind.RECURRENT) for spec in specs)

    @property
    def num_tensors(self) -> int:
        """Tensors to allocate: as many as the largest group has layers."""
        return max((len(group.layers) for group in self.groups), default=0)

    def tensor_page_bytes(self, tensor: int) -> int:
        """Bytes of one page of a tensor: what the largest of the layers that share it needs, in whole lines of a cache where
        they differ."""
        most = max(group.spec.page_bytes for group in self.groups if len(group.layers) > tensor)
        return most if self.is_uniform else -(-most // CACHE_LINE) * CACHE_LINE

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the pool, over all tensors."""
        return sum(self.tensor_page_bytes(tensor) for tensor in range(self.num_tensors))

    @property
    def block_size(self) -> int:
        """Tokens a page (equal in all groups)."""
        return self.groups[0].spec.block_size


GROUP_COST = 0.02
"""What one more group may save in memory to be worth its page table, which every step has to fill: two in a hundred."""


def group_layers(specs: list[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs form groups, in order of first appearance.

    Groups share tensors (layer j of each lives in tensor j), so a group shorter than the longest leaves part of its
    pages unused. Where there are several specs, each one's layers are therefore split into groups of about equal size:
    25 sliding-window and 5 full layers become five groups of 5 and one of 5. The size is the one that wastes least,
    counting `GROUP_COST` for every group.
    """
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    size = _group_size([len(layers) for layers in by_spec.values()])
    return tuple(
        KVCacheGroup(spec=spec, layers=tuple(part))
        for spec, layers in by_spec.items()
        for part in _split_evenly(layers, -(-len(layers) // size))
    )


def _group_size(counts: list[int]) -> int:
    """Layers a group, given how many layers each spec has."""

    def cost(size: int) -> tuple[float, int]:
        groups = sum(-(-count // size) for count in counts)
        waste = groups * size / sum(counts) - 1.0
        return waste + GROUP_COST * groups, -size

    return min(range(1, max(counts, default=1) + 1), key=cost)


def _split_evenly(layers: list[int], parts: int) -> list[list[int]]:
    """Consecutive parts whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(len(layers), parts)
    ends = [size * (part + 1) + min(part + 1, larger) for part in range(parts)]
    return [layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]
