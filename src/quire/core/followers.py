"""Requests held back because one that runs computes the pages that they begin with: they follow once it has.

A page can be found by others when the step that computed it was collected, which is two steps later if steps are planned
ahead. Prompts that arrive together and begin alike would therefore all compute what they have in common; here the first
one leads and the others wait for it. Nothing is shared but through the prefix cache: a follower that queues again looks
its pages up like everybody else, so that a leader that fails, ends or gives way spoils nothing.

Knows page names and tokens; nothing of rows or budgets.
"""

from collections.abc import Sequence

from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request_state import Request

MIN_COMMON_TOKENS = 256
"""Tokens that a request must save to be held back. It waits for a step or two, and a step takes a device about as long
with one prompt token as with this many, because it reads the same weights: an H200 computes 206 tokens in bfloat16 in the
time that it takes to read them (989 TFLOP/s at two operations a weight, 4.8 TB/s at two bytes)."""


def count_equal_pages(one: Sequence[int], other: Sequence[int], block_size: int, start: int, end: int) -> int:
    """Up to which page two sequences of tokens agree, at most `end`, if they do up to page `start`."""
    while start < end:
        middle = (start + end + 1) // 2
        tokens = slice(start * block_size, middle * block_size)
        if one[tokens] == other[tokens]:
            start = middle
        else:
            end = middle - 1
    return start


class Followers:
    """Who computes which page, and who waits for it.

    Args:
        kv: names pages.
        min_tokens: common tokens, not computed yet, for which a request is held back.
    """

    def __init__(self, kv: KVCacheManager, min_tokens: int = MIN_COMMON_TOKENS) -> None:
        self._kv = kv
        self._min_tokens = max(min_tokens, kv.block_size)
        self._leader_at: dict[bytes, Request] = {}
        self._page_of: dict[Request, bytes] = {}
        self._followers: dict[Request, dict[Request, int]] = {}
        self._leader_of: dict[Request, Request] = {}

    def __len__(self) -> int:
        """Requests held back."""
        return len(self._leader_of)

    def must_follow(self, request: Request, num_tokens: int) -> bool:
        """Whether a request that could start behind `num_tokens` cached tokens is to be held back instead; it then is.

        It waits only for one of lower rank, which is served before it in any case.
        """
        if not self._leader_at or not request.reads_cache:
            return False
        size = self._kv.block_size
        first, last = num_tokens // size, (len(request.token_ids) - 1) // size
        if (last - first) * size < self._min_tokens:
            return False
        leader = self._leader_at.get(self._kv.page_name(request, first))
        if leader is None or leader.rank > request.rank:
            return False
        last = min(last, len(leader.token_ids) // size)
        common = count_equal_pages(request.token_ids, leader.token_ids, size, first, last)
        if (common - first) * size < self._min_tokens:
            return False
        self._followers.setdefault(leader, {})[request] = common * size
        self._leader_of[request] = leader
        return True

    def leader_of(self, request: Request) -> Request:
        """Who computes what a request that is held back waits for."""
        return self._leader_of[request]

    def advance(self, leader: Request, num_tokens: int) -> list[Request]:
        """The first `num_tokens` tokens of a request that runs can be found, or will be with the next publication.

        Returns the followers for whom too little is left to wait for.
        """
        self._stop_leading(leader)
        size = self._kv.block_size
        first = num_tokens // size
        if (len(leader.token_ids) // size - first) * size >= self._min_tokens and leader.publishes:
            name = self._kv.page_name(leader, first)
            if name and self._leader_at.setdefault(name, leader) is leader:
                self._page_of[leader] = name
        followers = self._followers.get(leader)
        if not followers:
            return []
        released = [request for request, end in followers.items() if end - first * size < self._min_tokens]
        for request in released:
            self._release(request)
        return released

    def leave(self, request: Request) -> list[Request]:
        """A request has ended, wherever it was, or gives its pages up. Returns its followers."""
        if request in self._leader_of:
            self._release(request)
        self._stop_leading(request)
        released = list(self._followers.get(request, ()))
        for follower in released:
            self._release(follower)
        return released

    def leave_all(self) -> list[Request]:
        """Nothing that is computed now will be found. Returns all followers."""
        self._leader_at.clear()
        self._page_of.clear()
        self._followers.clear()
        released = list(self._leader_of)
        self._leader_of.clear()
        return released

    def _stop_leading(self, request: Request) -> None:
        name = self._page_of.pop(request, None)
        if name is not None:
            del self._leader_at[name]

    def _release(self, request: Request) -> None:
        leader = self._leader_of.pop(request)
        followers = self._followers[leader]
        del followers[request]
        if not followers:
            del self._followers[leader]
