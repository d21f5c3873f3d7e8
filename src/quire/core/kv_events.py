"""The prefix cache's diary: which pages became findable and which ceased to be, for whoever routes by cache content.

Off by default. Bounded: a reader who never drains it gets one `AllBlocksCleared` instead of the entries that were dropped.
"""

import msgspec

MAX_EVENTS = 65536


class BlockStored(msgspec.Struct, array_like=True, tag="stored"):
    """A page's content can be found from now on; `parent_hash` is the page before it (its chain's root for the first)."""

    block_hash: bytes
    parent_hash: bytes
    token_ids: list[int]
    group: int


class BlockRemoved(msgspec.Struct, array_like=True, tag="removed"):
    """A page lost its content."""

    block_hash: bytes
    group: int


class AllBlocksCleared(msgspec.Struct, array_like=True, tag="cleared"):
    """Nothing recorded before this holds any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """Collects events until somebody drains them. Page keys are (block hash, KV group)."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def block_stored(self, key: tuple[bytes, int], parent_hash: bytes, token_ids: list[int]) -> None:
        """A page was published."""
        self._append(BlockStored(block_hash=key[0], parent_hash=parent_hash, token_ids=token_ids, group=key[1]))

    def block_removed(self, key: tuple[bytes, int]) -> None:
        """A page was evicted."""
        self._append(BlockRemoved(block_hash=key[0], group=key[1]))

    def all_cleared(self) -> None:
        """The cache was reset."""
        self._events = [AllBlocksCleared()]

    def drain(self) -> list[KVEvent]:
        """Everything since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _append(self, event: KVEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._events = [AllBlocksCleared()]
        self._events.append(event)
