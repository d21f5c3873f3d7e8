"""Requests held back because one that runs computes what they begin with: they follow once it has.

A page can be found by others when the step that computed it was collected, which is two steps later if steps are planned
ahead. Prompts that arrive together and begin alike would therefore all compute what they have in common; here the first
one leads and the others wait for it. Two kinds of request follow:

- one that begins with a page that its leader computes. It finds the page through the prefix cache, as everybody does, so a
  leader that fails, ends or gives way spoils nothing;
- a sibling (n > 1) of its leader, with or without prefix cache. Once the prompt is computed, the siblings' group holds a
  reference to its full pages until every sibling has them. Under shortage that reference can be dropped: the next sibling
  then leads.

Knows page names and tokens; nothing of rows or budgets.
"""

import dataclasses
from collections.abc import Sequence

from quire.core.kv_cache_manager import KVCacheManager, PrefixHit
from quire.core.request_state import Request
from quire.request import EngineRequest

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


@dataclasses.dataclass
class _Siblings:
    """The requests of one `group_id` and prompt: who computes it, who has no pages of it yet, and the pages."""

    prompt: EngineRequest
    leader: Request | None = None
    waiting: set[Request] = dataclasses.field(default_factory=set[Request])
    shared: PrefixHit | None = None


class CommonPrefixes:
    """Who computes what others begin with, and who waits for it.

    Args:
        kv: names and shares pages.
        min_tokens: common tokens, not computed yet, for which a request is held back.
    """

    def __init__(self, kv: KVCacheManager, min_tokens: int = MIN_COMMON_TOKENS) -> None:
        self._kv = kv
        self._min_tokens = max(min_tokens, kv.block_size)
        self._groups: dict[str, _Siblings] = {}
        self._leader_at: dict[bytes, Request] = {}
        self._page_of: dict[Request, bytes] = {}
        self._followers: dict[Request, dict[Request, int]] = {}
        self._leader_of: dict[Request, Request] = {}

    def __len__(self) -> int:
        """Requests held back."""
        return len(self._leader_of)

    def arrived(self, request: Request) -> None:
        """A request is to be served: its siblings keep the prompt's pages for it."""
        group_id = request.source.group_id
        if group_id is not None and self._prompt_pages(request):
            group = self._groups.setdefault(group_id, _Siblings(request.source))
            if _are_equal_prompts(group.prompt, request.source):
                group.waiting.add(request)

    def shared(self, request: Request) -> PrefixHit | None:
        """The prompt's pages, where a sibling has computed them for this request."""
        group = self._group(request)
        if group is None or request not in group.waiting:
            return None
        self._share(group)
        return group.shared

    def follow(self, request: Request, num_tokens: int) -> Request | None:
        """Who computes more of this request than the `num_tokens` tokens that it would begin behind, if it is worth waiting
        for: the request then is one of its followers.

        It waits only for one of lower rank, which is served before it in any case.
        """
        found = self._sibling_ahead(request, num_tokens) or self._page_ahead(request, num_tokens)
        if found is None:
            return None
        leader, end = found
        self._followers.setdefault(leader, {})[request] = end
        self._leader_of[request] = leader
        return leader

    def started(self, request: Request) -> None:
        """A request has its pages, and computes what follows them."""
        group = self._group(request)
        if group is not None and request in group.waiting:
            group.leader = group.leader or request
            group.waiting.remove(request)
            self._tidy(group, request)
        self._lead(request, request.num_computed_tokens)

    def advance(self, leader: Request, num_tokens: int) -> list[Request]:
        """The first `num_tokens` tokens of a request that runs are computed: they can be found, or will be with the next
        publication. Returns the followers that have nothing to wait for any more."""
        self._stop_leading(leader)
        self._lead(leader, num_tokens)
        group = self._group(leader)
        if group is not None and group.leader is leader:
            self._share(group)
        followers = self._followers.get(leader, {})
        released = [request for request, end in followers.items() if num_tokens >= end]
        for request in released:
            self._release(request)
        return released

    def leave(self, request: Request, *, has_ended: bool) -> list[Request]:
        """A request has ended, wherever it was, or gives its pages up. Returns its followers."""
        if request in self._leader_of:
            self._release(request)
        self._stop_leading(request)
        group = self._group(request)
        if group is not None:
            if group.leader is request:
                group.leader = None
            if has_ended:
                group.waiting.discard(request)
            self._tidy(group, request)
        released = list(self._followers.get(request, ()))
        for follower in released:
            self._release(follower)
        return released

    def leave_all(self) -> list[Request]:
        """Nothing that is computed now will be found. Returns all followers."""
        self.drop_references()
        self._leader_at.clear()
        self._page_of.clear()
        self._followers.clear()
        released = list(self._leader_of)
        self._leader_of.clear()
        return released

    def drop_references(self) -> bool:
        """Give up all pages held for siblings that wait. True where any page became free."""
        before = self._kv.pool.num_free
        for group in self._groups.values():
            self._drop(group)
        return self._kv.pool.num_free > before

    # Siblings.

    def _group(self, request: Request) -> _Siblings | None:
        group_id = request.source.group_id
        return self._groups.get(group_id) if group_id is not None else None

    def _prompt_pages(self, request: Request) -> int:
        """Tokens of the prompt's full pages that siblings can share, leaving at least one token to compute."""
        if request.wants_prompt_logprobs or request.is_pooling:
            return 0
        return (request.num_prompt_tokens - 1) // self._kv.block_size * self._kv.block_size

    def _sibling_ahead(self, request: Request, num_tokens: int) -> tuple[Request, int] | None:
        group = self._group(request)
        if group is None or request not in group.waiting or num_tokens >= self._prompt_pages(request):
            return None
        leader = group.leader
        if leader is None or leader.num_computed_tokens >= leader.num_prompt_tokens or not leader.publishes:
            return None
        return None if leader.rank > request.rank else (leader, leader.num_prompt_tokens)

    def _share(self, group: _Siblings) -> None:
        """Hold the prompt's pages for the siblings that have none, if they are computed."""
        leader = group.leader
        if leader is None or group.shared is not None or not group.waiting or not leader.publishes:
            return
        if leader.num_computed_tokens < leader.num_prompt_tokens:
            return
        hit = self._kv.find_shared(leader, self._prompt_pages(leader))
        if hit.num_tokens:
            for table in hit.block_ids:
                self._kv.pool.share(table)
            group.shared = hit

    def _tidy(self, group: _Siblings, request: Request) -> None:
        """Keep no pages, and no group, that no sibling needs any more."""
        if not group.waiting:
            self._drop(group)
            if group.leader is None:
                self._groups.pop(request.source.group_id or "", None)

    def _drop(self, group: _Siblings) -> None:
        hit, group.shared = group.shared, None
        if hit is not None:
            for table in hit.block_ids:
                self._kv.pool.free(reversed(table))

    # Pages with a name.

    def _page_ahead(self, request: Request, num_tokens: int) -> tuple[Request, int] | None:
        if not self._leader_at or not request.reads_cache:
            return None
        size = self._kv.block_size
        first, last = num_tokens // size, (len(request.token_ids) - 1) // size
        if (last - first) * size < self._min_tokens:
            return None
        leader = self._leader_at.get(self._kv.page_name(request, first))
        if leader is None or leader.rank > request.rank:
            return None
        last = min(last, len(leader.token_ids) // size)
        common = count_equal_pages(request.token_ids, leader.token_ids, size, first, last)
        if (common - first) * size < self._min_tokens:
            return None
        # The follower goes on when less than `min_tokens` is left to wait for, counted in whole pages.
        return leader, (common * size - self._min_tokens) // size * size + size

    def _lead(self, leader: Request, num_tokens: int) -> None:
        """Let others find this request under the name of the page that it computes next."""
        size = self._kv.block_size
        first = num_tokens // size
        if (len(leader.token_ids) // size - first) * size >= self._min_tokens and leader.publishes:
            name = self._kv.page_name(leader, first)
            if name and self._leader_at.setdefault(name, leader) is leader:
                self._page_of[leader] = name

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


def _are_equal_prompts(one: EngineRequest, other: EngineRequest) -> bool:
    """Whether two requests' prompts mean the same."""
    are_alike = one.cache_salt == other.cache_salt and one.adapter == other.adapter
    are_alike &= [item.key for item in one.media] == [item.key for item in other.media]
    return are_alike and one.prompt_token_ids == other.prompt_token_ids
