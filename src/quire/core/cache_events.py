"""What the prefix cache tells others, in the message format of vLLM: pages that can be found, and those that no longer can.

Knows pages' names and requests' tokens. Knows nothing of sockets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.config.kv_spec import KVCacheGroup, KVKind
from quire.core.block_pool import BlockKey
from quire.core.request_state import Request

PageName = bytes | int
DEVICE = "GPU"
"""The medium of pages in the device's cache, whatever the device: what listeners know."""
_KINDS = {
    KVKind.FULL: "full_attention",
    KVKind.MLA: "mla_attention",
    KVKind.SLIDING_WINDOW: "sliding_window",
    KVKind.CHUNKED_LOCAL: "chunked_local_attention",
    KVKind.RECURRENT: "mamba",
}
_LOW_BITS = (1 << 64) - 1


class CacheEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """A change of the prefix cache: a map whose `type` is the class's name."""


class BlockStored(CacheEvent):
    """Pages can be found from now on.

    Attributes:
        block_hashes: names of pages that follow one another; `parent_block_hash`: of the one before, None if there is none.
        token_ids: of all of them. `block_size`: tokens of each.
        lora_id, lora_name: the adapter that they were computed with.
        extra_keys: for each page what it depends on beside its tokens.
        group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window: the layers that they are of.
    """

    block_hashes: list[PageName]
    parent_block_hash: PageName | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(CacheEvent):
    """Pages of a group can be found no longer."""

    block_hashes: list[PageName]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(CacheEvent):
    """No page can be found any more."""


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of one moment, in their order. `ts`: seconds since 1970. `data_parallel_rank`: of the model's copy."""

    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


class CacheEvents:
    """Collects events, and sends them when it is told to, or when all is forgotten.

    Args:
        send: is given what has happened since its last call.
        numbers: name pages by the last 64 bits of their names, as numbers.
    """

    def __init__(
        self, groups: Sequence[KVCacheGroup], send: Callable[[list[AnyEvent]], None], *, numbers: bool = True
    ) -> None:
        self._send = send
        self._specs = [group.spec for group in groups]
        self._name: Callable[[bytes], PageName] = _number if numbers else bytes
        self._events: list[AnyEvent] = []

    def flush(self) -> None:
        """Send what has happened."""
        if self._events:
            events, self._events = self._events, []
            self._send(events)

    def stored(self, request: Request, pages: Sequence[int], group: int) -> None:
        """These pages of a request, by their position in ascending order, can be found in a group."""
        first = 0
        for index in range(1, len(pages) + 1):
            if index == len(pages) or pages[index] != pages[index - 1] + 1:
                self._store_run(request, pages[first], pages[index - 1] + 1, group)
                first = index

    def _store_run(self, request: Request, start: int, end: int, group: int) -> None:
        spec, adapter, names = self._specs[group], request.source.adapter, request.hashes
        size = spec.block_size
        event = BlockStored(
            block_hashes=[self._name(name) for name in names[start:end]],
            parent_block_hash=self._name(names[start - 1]) if start else None,
            token_ids=list(request.token_ids[start * size : end * size]),
            block_size=size,
            lora_id=None if adapter is None else adapter.lora_int_id,
            medium=DEVICE,
            lora_name=None if adapter is None else adapter.lora_name,
            extra_keys=_extra_keys(request, range(start, end), size),
            group_idx=group,
            kv_cache_spec_kind=_KINDS[spec.kind],
            kv_cache_spec_sliding_window=spec.window if spec.kind is KVKind.SLIDING_WINDOW else None,
        )
        self._events.append(event)

    def forgotten(self, key: BlockKey | None) -> None:
        """A page of this name and group was taken for something else; None: all pages are forgotten."""
        if key is None:
            self._events.append(AllBlocksCleared())
            self.flush()
            return
        name, group = self._name(key[0]), key[1]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved([name], DEVICE, group))


def _number(name: bytes) -> int:
    return int.from_bytes(name, "big") & _LOW_BITS


def _extra_keys(request: Request, pages: range, size: int) -> list[tuple[Any, ...] | None]:
    adapter, salt, marks = request.source.adapter, request.source.cache_salt, request.marks(size)
    keys: list[tuple[Any, ...] | None] = []
    for page in pages:
        of_page: list[Any] = [] if adapter is None else [adapter.lora_name]
        for mark in marks.get(page, b"").decode().split(";")[:-1]:
            item, _, offset = mark.rpartition("@")
            of_page.append((item, int(offset)))
        if page == 0 and salt:
            of_page.append(salt)
        keys.append(tuple(of_page) or None)
    return keys
