"""The block pool: which KV-cache pages are free, shared, or cached for reuse.

Knows page ids, reference counts and prefix hashes. Knows nothing of requests, tensors or devices. Every operation is
O(1) in the number of pages.

Free pages form one doubly linked list, threaded through two integer arrays so that a page in its middle can be taken
out at once when a prefix hit revives it. Pages that hold nothing reusable are put at its front and are handed out
first; cached ones are put at its back, so that the least recently freed cached page is the next to lose its content.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np

from quire.errors import ConfigError, EngineError

NULL_BLOCK = 0
"""The page that is never handed out: where padding writes go, and what stands for pages behind a window."""

_END = 0
"""The list's sentinel is the null page's slot: it is never free, so its links are unused otherwise."""
_LONG_RUN = 64
"""Pages from which arrays are faster than a loop."""


BlockKey = tuple[bytes, int]
"""What names a page's content: the hash of its prefix, and the KV group that it was computed for."""


class BlockPool:
    """Reference-counted pages with least-recently-freed reuse of cached ones.

    Args:
        num_blocks: pages in the pool; page 0 is never handed out (padding writes go there).

    Attributes:
        on_forget: called with what no page can be found by any more; with None where all is forgotten.

    Raises:
        ConfigError: fewer than two pages.
    """

    def __init__(self, num_blocks: int) -> None:
        self.on_forget: Callable[[BlockKey | None], None] | None = None
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks is {num_blocks}; at least 2 are needed, because page 0 is never handed out",
                setting="num_gpu_blocks_override",
            )
        self.num_blocks = num_blocks
        self._references = array("i", bytes(4 * num_blocks))
        self._next = array("i", [*range(1, num_blocks), _END])
        self._previous = array("i", [num_blocks - 1, *range(num_blocks - 1)])
        # The same memory as arrays, for long runs of pages.
        self._references_P, self._next_P, self._previous_P = (
            np.frombuffer(values, dtype=np.int32) for values in (self._references, self._next, self._previous)
        )
        self._num_free = num_blocks - 1
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[int, dict[bytes, int]] = {}

    @property
    def num_usable(self) -> int:
        """Pages that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now, cached ones included."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Pages that a prefix lookup can find, free or in use."""
        return len(self._key_of)

    def reference_count(self, block: int) -> int:
        """How many tables hold the page."""
        return self._references[block]

    def count_free(self, blocks: list[int]) -> int:
        """How many of these pages nobody holds; null pages do not count."""
        if len(blocks) >= _LONG_RUN:
            return int(np.count_nonzero(self._references_P[blocks] == 0)) - blocks.count(NULL_BLOCK)
        references = self._references
        return sum([references[block] == 0 for block in blocks]) - blocks.count(NULL_BLOCK)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference. The caller has looked at `num_free`.

        Raises:
            EngineError: fewer are free.
        """
        if count > self._num_free:
            raise EngineError(f"{count} pages asked for, {self._num_free} are free")
        blocks: list[int] = []
        following, references = self._next, self._references
        block = following[_END]
        for _ in range(count):
            blocks.append(block)
            references[block] = 1
            block = following[block]
        following[_END] = block
        self._previous[block] = _END
        self._num_free -= count
        if self._key_of:
            for taken in blocks:
                if taken in self._key_of:
                    self._forget(taken)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference to each page; a free cached one comes back to life. Null pages are passed over."""
        if len(blocks) >= _LONG_RUN and self._share_run(blocks):
            return
        references = self._references
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            count = references[block]
            if count == 0:
                if block not in self._key_of:
                    raise EngineError(f"page {block} is free and holds nothing that could be shared")
                self._unlink(block)
            references[block] = count + 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each page. Null pages are passed over.

        Pages without references become free in the given order: of cached ones, the first given is the first evicted.

        Raises:
            EngineError: a page has no reference (somebody frees twice).
        """
        references, key_of, following, previous = self._references, self._key_of, self._next, self._previous
        blocks = list(blocks)
        if len(blocks) >= _LONG_RUN and self._free_run(blocks):
            return
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            left = references[block] - 1
            if left < 0:
                raise EngineError(f"page {block} is freed twice")
            references[block] = left
            if left == 0:
                before = previous[_END] if block in key_of else _END
                after = following[before]
                following[before] = previous[after] = block
                previous[block], following[block] = before, after
                self._num_free += 1

    def _share_run(self, blocks: list[int]) -> bool:
        """`share` for pages that are all in use, or all free and neighbours in the free list as `free` leaves a table (its
        last page first). False where they are neither: then nothing is done."""
        pages_N = np.array(blocks, dtype=np.int32)
        references_N = self._references_P[pages_N]
        if not pages_N.all():
            return False
        if references_N.all():
            self._references_P[pages_N] = references_N + 1
            return True
        are_neighbours = not references_N.any() and (self._next_P[pages_N[1:]] == pages_N[:-1]).all()
        if not are_neighbours or not all(map(self._key_of.__contains__, blocks)):
            return False
        before, following = self._previous[blocks[-1]], self._next[blocks[0]]
        self._next[before], self._previous[following] = following, before
        self._references_P[pages_N] = 1
        self._num_free -= len(blocks)
        return True

    def _free_run(self, blocks: list[int]) -> bool:
        """`free` for pages that all stay in use, or all become free, cached but for the first few. False where they do neither:
        then nothing is done."""
        pages_N = np.array(blocks, dtype=np.int32)
        references_N = self._references_P[pages_N]
        if not pages_N.all() or len(set(blocks)) < len(blocks):
            return False
        if (references_N > 1).all():
            self._references_P[pages_N] = references_N - 1
            return True
        first = next((index for index, block in enumerate(blocks) if block in self._key_of), len(blocks))
        is_long = len(blocks) - first >= _LONG_RUN // 2
        if not is_long or (references_N != 1).any() or not all(map(self._key_of.__contains__, blocks[first:])):
            return False
        self.free(blocks[:first])
        pages_N, last = pages_N[first:], self._previous[_END]
        self._next_P[pages_N[:-1]], self._previous_P[pages_N[1:]] = pages_N[1:], pages_N[:-1]
        self._next[last], self._previous[blocks[first]] = blocks[first], last
        self._next[blocks[-1]], self._previous[_END] = _END, blocks[-1]
        self._references_P[pages_N] = 0
        self._num_free += len(pages_N)
        return True

    def find_cached(self, key: BlockKey) -> int | None:
        """The page that holds this content, if any; `share` it before anything else is allocated."""
        name, group = key
        return self._block_of.get(group, {}).get(name)

    def find_run(self, names: list[bytes], group: int) -> list[int]:
        """The pages that hold these contents in a group, up to the first that cannot be found."""
        blocks = list(map(self._block_of.get(group, {}).get, names))
        return cast("list[int]", blocks[: blocks.index(None)] if None in blocks else blocks)

    def publish_run(self, blocks: list[int], names: list[bytes], group: int) -> list[int]:
        """Let later requests find each page's content under its name in a group; null pages are passed over. Returns the indices
        of those whose content could not be found before.

        Raises:
            EngineError: a page is free, or published as something else.
        """
        references, key_of, block_of = self._references, self._key_of, self._block_of.setdefault(group, {})
        published: list[int] = []
        for index, block in enumerate(blocks):
            if block == NULL_BLOCK:
                continue
            key = (names[index], group)
            if references[block] == 0 or key_of.get(block, key) != key:
                raise EngineError(f"page {block} cannot be published: it is free or holds something else")
            if key[0] not in block_of:
                block_of[key[0]] = block
                key_of[block] = key
                published.append(index)
        return published

    def clear_cache(self) -> int:
        """Forget all published content; pages in use stay with their owners. Returns how many were forgotten."""
        count = len(self._key_of)
        self._key_of.clear()
        self._block_of.clear()
        if self.on_forget is not None:
            self.on_forget(None)
        return count

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key[1]][key[0]]
        if self.on_forget is not None:
            self.on_forget(key)

    def _unlink(self, block: int) -> None:
        before, following = self._previous[block], self._next[block]
        self._next[before] = following
        self._previous[following] = before
        self._num_free -= 1
