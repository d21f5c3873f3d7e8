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
    """Of what an encoder has read beside the prompt: written once, read by every token, in pages of their own."""


class KVCacheSpec(msgspec.Struct, frozen=True):
    """One layer's cache.

    Attributes:
        block_size: tokens a page.
        bytes_per_token: keys and values of one token in this layer (for `RECURRENT`, bytes of one state).
        window: tokens that stay visible, for `SLIDING_WINDOW` and `CHUNKED_LOCAL`; 0 means all. Of `CROSS`: the longest that an
            encoder may read.
        num_kv_heads, head_dim, dtype: what the allocator needs.
        ranks: so many share the tokens of a context, each with every so-many-th of them, and with as small a part of each page.
        rules: the name of rules of a layer's own, by which its pages are kept and given back (`core/kv_groups.py`); empty:
            those of its kind.
    """

    kind: KVKind
    block_size: int
    bytes_per_token: int
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"
    window: int = 0
    ranks: int = 1
    rules: str = ""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this layer, on one rank."""
        return self.bytes_per_token * (1 if self.kind is KVKind.RECURRENT else self.block_size // self.ranks)


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one page table: page id p of the group means page p in each of its layers' tensors.

    Attributes:
        spec: of its first layer. `specs`: of each layer, where they are not all the same: pages of all have the same tokens and
            are kept by the same rules.
        per_tensor: so many of them, which follow one another, lie side by side in each page of a tensor.
    """

    spec: KVCacheSpec
    layers: tuple[int, ...]
    specs: tuple[KVCacheSpec, ...] = ()
    per_tensor: int = 1

    def of_layers(self, layers: range) -> "KVCacheGroup":
        """The group with these layers alone, counted from the first of them."""
        kept = [index for index, layer in enumerate(self.layers) if layer in layers]
        specs = tuple(self.specs[index] for index in kept) if self.specs else ()
        return KVCacheGroup(
            self.spec, tuple(self.layers[index] - layers.start for index in kept), specs, self.per_tensor
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all of its layers, each with a tensor of its own."""
        return sum(self.spec_of(index).page_bytes for index in range(len(self.layers)))

    def spec_of(self, index: int) -> KVCacheSpec:
        """The spec of the group's layer of this number."""
        return self.specs[index] if self.specs else self.spec

    @property
    def num_tensors(self) -> int:
        """Tensors in which its layers live."""
        return -(-len(self.layers) // self.per_tensor)

    def start_of(self, index: int) -> int:
        """Bytes before the group's layer of this number in a page of its tensor."""
        return sum(_lines(self.spec_of(each).page_bytes) for each in range(index - index % self.per_tensor, index))

    def bytes_in(self, tensor: int) -> int:
        """Bytes of a page of a tensor that its layers need."""
        last = min((tensor + 1) * self.per_tensor, len(self.layers)) - 1
        return self.start_of(last) + self.spec_of(last).page_bytes


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The result of planning: how many pages there are, and which layers use them.

    All groups take page ids from one pool of `num_blocks`. Memory is `num_tensors` tensors of `num_blocks` pages each;
    the j-th layer of *every* group lives in tensor j (or the j-th few do), so that a page id is used by exactly one group at a
    time and no byte is reserved twice. Page 0 is the null page: never handed out, and where padding writes go.

    The layers of `cross` have `num_cross_blocks` pages of their own, of which one is never handed out, too: they belong to what
    encoders have read rather than to requests, so that several requests may read the same. Of the `num_host_blocks` pages of host
    memory, which swapped requests have, the same holds.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    num_host_blocks: int = 0
    cross: KVCacheGroup | None = None
    num_cross_blocks: int = 0

    @property
    def is_uniform(self) -> bool:
        """Whether all layers keep keys and values, in pages of one size and type; otherwise a tensor's page is bytes, of
        which each layer uses the first so many."""
        specs = [group.spec_of(index) for group in self.groups for index in range(len(group.layers))]
        alike = {(spec.page_bytes, spec.dtype) for spec in specs}
        return len(alike) == 1 and not any(spec.kind in (KVKind.MLA, KVKind.RECURRENT) for spec in specs)

    @property
    def num_tensors(self) -> int:
        """Tensors to allocate: as many as the largest group has."""
        return max((group.num_tensors for group in self.groups), default=0)

    def tensor_page_bytes(self, tensor: int) -> int:
        """Bytes of one page of a tensor: what the largest of the layers that share it needs, in whole lines of a cache where
        they differ."""
        return self._page_bytes_of(tensor, 1 if self.is_uniform else CACHE_LINE)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the pool, over all tensors."""
        line = 1 if self.is_uniform else CACHE_LINE  # which looks at all layers: once, and not for each tensor
        return sum(self._page_bytes_of(tensor, line) for tensor in range(self.num_tensors))

    def _page_bytes_of(self, tensor: int, line: int) -> int:
        most = max(group.bytes_in(tensor) for group in self.groups if group.num_tensors > tensor)
        return _lines(most, line)

    def of_layers(self, layers: range) -> "KVCacheConfig":
        """What a worker that has only these layers allocates: the same groups and pages, and tensors for its own layers, counted
        from 0."""
        groups = (group.of_layers(layers) for group in self.groups)
        return msgspec.structs.replace(self, groups=tuple(groups))

    @property
    def block_size(self) -> int:
        """Tokens a page (equal in all groups)."""
        return self.groups[0].spec.block_size


def _lines(num_bytes: int, line: int = CACHE_LINE) -> int:
    """So many bytes in whole lines."""
    return -(-num_bytes // line) * line


FULL_TABLE = "full"
"""What layers that keep all tokens are grouped by."""
GROUP_COST = 0.02
"""What one more group may save in memory to be worth its page table, which every step has to fill: two in a hundred."""


def group_layers(specs: list[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs form groups, in order of first appearance; layers that keep all tokens form one, however many bytes
    each of them takes.

    Groups share tensors (layer j of each lives in tensor j, whose pages have the bytes of the largest), so a group that is
    shorter than the longest, or whose pages are smaller, leaves part of its pages unused. Where there are several specs,
    each one's layers are therefore split into groups of about equal size: 25 sliding-window and 5 full layers become five
    groups of 5 and one of 5. The size is the one that wastes the fewest bytes, counting `GROUP_COST` for every group.
    Where ranks share the tokens of some layers only, these have smaller pages: as many of them as there is room for lie side by
    side, and they alone count, since others keep few tokens.
    Layers with cross attention are in none of them (`cross_group`).
    """
    by_use: dict[KVCacheSpec | str, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec.kind is KVKind.CROSS:
            continue
        keeps_all = spec.kind is KVKind.FULL and not spec.rules
        by_use.setdefault(FULL_TABLE if keeps_all else spec, []).append(layer)

    def cost(groups: tuple[KVCacheGroup, ...]) -> float:
        long = [group for group in groups if group.spec.ranks > 1] or groups
        reserved = len(long) * KVCacheConfig(num_blocks=0, groups=groups).page_bytes
        return reserved / sum(group.page_bytes for group in long) - 1.0 + GROUP_COST * len(groups)

    sizes = range(max(map(len, by_use.values()), default=1), 0, -1)
    return min((_groups_of(specs, list(by_use.values()), size) for size in sizes), key=cost)


def cross_group(specs: list[KVCacheSpec]) -> KVCacheGroup | None:
    """The layers with cross attention; None where there are none."""
    layers = [layer for layer, spec in enumerate(specs) if spec.kind is KVKind.CROSS]
    return _group_of([specs[layer] for layer in layers], layers) if layers else None


def cross_pages(cross: KVCacheGroup) -> int:
    """Pages of the longest that an encoder may read."""
    return -(-cross.spec.window // cross.spec.block_size)


def _groups_of(specs: list[KVCacheSpec], uses: list[list[int]], size: int) -> tuple[KVCacheGroup, ...]:
    """Groups of at most `size` tensors."""
    most = max((spec.page_bytes for spec in specs), default=0)
    groups: list[KVCacheGroup] = []
    for layers in uses:
        own = [specs[layer] for layer in layers]
        is_shared = any(spec.ranks > 1 for spec in own)
        per_tensor = max(1, most // max(_lines(spec.page_bytes) for spec in own)) if is_shared else 1
        parts = _split_evenly(layers, -(-len(layers) // (size * per_tensor)))
        groups.extend(_group_of([specs[layer] for layer in part], part, per_tensor) for part in parts)
    return tuple(groups)


def _group_of(specs: list[KVCacheSpec], layers: list[int], per_tensor: int = 1) -> KVCacheGroup:
    are_alike = len(set(specs)) == 1
    return KVCacheGroup(specs[0], tuple(layers), () if are_alike else tuple(specs), per_tensor)


def _split_evenly(layers: list[int], parts: int) -> list[list[int]]:
    """Consecutive parts whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(len(layers), parts)
    ends = [size * (part + 1) + min(part + 1, larger) for part in range(parts)]
    return [layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]


STATE_BLOCK_SIZE = 512
"""Tokens a page where all layers keep states. A state costs as much for one token as for a thousand, so longer pages save
memory while a prompt is computed, and shorter ones let more prompts join an earlier one. A Mamba-2 of 2.7 billion
parameters keeps 168 MB of states; a transformer of its size keeps as much for 512 tokens."""


def suitable_block_size(specs: list[KVCacheSpec]) -> int | None:
    """Tokens a page that layers with states ask for: the smallest multiple of 16 with which a page of each attention layer
    has at least the bytes of a state, since pages of all layers come from one pool. None where no layer has a state."""
    states = [spec.page_bytes for spec in specs if spec.kind is KVKind.RECURRENT]
    tokens = [spec.bytes_per_token for spec in specs if spec.kind is not KVKind.RECURRENT]
    if not states:
        return None
    return -(-max(states) // (16 * min(tokens))) * 16 if tokens else STATE_BLOCK_SIZE


def describe_memory(specs: list[KVCacheSpec]) -> dict[str, int | str]:
    """What requests cost in pages, and why pages are as long as they are; padding is counted.

    `kv_bytes_per_token`: for each token, in groups that keep all of them. `kv_bytes_per_request`: besides, for a request
    that is longer than every window, in groups that keep a bounded past or a state; and for what an encoder has read at most.
    """
    groups = group_layers(specs)
    page_bytes = KVCacheConfig(num_blocks=0, groups=groups).page_bytes
    size = specs[0].block_size
    full = sum(group.spec.kind in (KVKind.FULL, KVKind.MLA) for group in groups)
    bounded = sum(_pages_kept(group.spec) for group in groups)
    numbers: dict[str, int | str] = {"block_size": size, "kv_bytes_per_token": full * page_bytes // size}
    cross = cross_group(specs)
    if bounded or cross is not None:
        read = 0 if cross is None else cross_pages(cross) * cross.page_bytes
        numbers["kv_bytes_per_request"] = bounded * page_bytes + read
    if why := _explain_block_size(specs):
        numbers["block_size_reason"] = why
    return numbers


def _pages_kept(spec: KVCacheSpec) -> int:
    """Pages that a long request holds in a group with a bounded past: what it sees, what it writes, and the page boundary
    before; with a state, the last boundary's and its own."""
    if spec.kind is KVKind.RECURRENT:
        return 2
    return -(-(spec.window - 1) // spec.block_size) + 2 if spec.window else 0


def _explain_block_size(specs: list[KVCacheSpec]) -> str:
    """Empty where no layer has a state."""
    wanted, size = suitable_block_size(specs), specs[0].block_size
    if wanted is None:
        return ""
    state = max(spec.page_bytes for spec in specs if spec.kind is KVKind.RECURRENT)
    tokens = [spec.bytes_per_token for spec in specs if spec.kind is not KVKind.RECURRENT]
    if not tokens:
        return f"every layer keeps a state of up to {state} bytes, and a request can join another at a page's end"
    needs = f"a state takes {state} bytes, and {wanted} tokens of attention ({min(tokens)} bytes each) at least as much"
    return needs if size >= wanted else f"{needs}; shorter pages, as asked for, are padded to {state} bytes"
