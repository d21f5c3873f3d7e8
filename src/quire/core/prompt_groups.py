"""Siblings (n > 1) and the prompt that they share: computed once, then held by reference, with or without prefix cache.

The first sibling leads. The others are held back until its prompt is computed; then the group itself holds a reference
to the prompt's full pages, until every sibling has been admitted onto them. Under shortage the references can be dropped:
the siblings then compute the prompt themselves. Knows pages and prompts; nothing of rows or budgets.
"""

import dataclasses

from quire.core.kv_cache_manager import KVCacheManager, PrefixHit
from quire.core.request_state import Request, RequestStatus


@dataclasses.dataclass
class _Group:
    leader: Request | None
    held: list[Request] = dataclasses.field(default_factory=list[Request])
    shared: PrefixHit | None = None
    sharers: set[str] = dataclasses.field(default_factory=set[str])


class PromptGroups:
    """All groups with a member that waits or leads."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._groups: dict[str, _Group] = {}
        self.num_held = 0

    def add(self, request: Request) -> bool:
        """A request arrives. True where it is to be held back until its leader has computed the prompt."""
        group_id = request.source.group_id
        if group_id is None or self._shared_tokens(request) == 0 or request.wants_prompt_logprobs or request.is_pooling:
            return False
        group = self._groups.get(group_id)
        if group is None:
            self._groups[group_id] = _Group(leader=request)
            return False
        leader = group.leader
        if leader is None or not _have_equal_prompts(leader, request):
            return False
        if not self._has_computed_prompt(leader):
            group.held.append(request)
            self.num_held += 1
            return True
        self._share(group, [request])
        return False

    def prompt_computed(self, request: Request) -> list[Request]:
        """A step that completed this request's prompt was collected. Returns the siblings that may queue now."""
        group = self._group(request)
        if group is None or group.leader is not request or not group.held:
            return []
        released, group.held = group.held, []
        self.num_held -= len(released)
        self._share(group, released)
        return released

    def hit(self, request: Request) -> PrefixHit | None:
        """The prompt pages that its group holds for this request."""
        group = self._group(request)
        return group.shared if group is not None and request.request_id in group.sharers else None

    def admitted(self, request: Request) -> None:
        """The request has its pages now."""
        group = self._group(request)
        if group is not None and request.request_id in group.sharers:
            self._stop_sharing(group, request)

    def ended(self, request: Request) -> list[Request]:
        """The request has ended, maybe before it was admitted. Returns siblings that may queue now."""
        group = self._group(request)
        if group is None:
            return []
        promoted: list[Request] = []
        if request.request_id in group.sharers:
            self._stop_sharing(group, request)
        if request in group.held:
            group.held.remove(request)
            self.num_held -= 1
        if group.leader is request:
            group.leader = group.held.pop(0) if group.held else None
            if group.leader is not None:
                self.num_held -= 1
                promoted.append(group.leader)
        if group.leader is None and not group.sharers:
            del self._groups[request.source.group_id or ""]
        return promoted

    def drop_references(self) -> bool:
        """Give up all pages held for siblings that wait. True where any page became free."""
        before = self._kv.pool.num_free
        for group_id, group in list(self._groups.items()):
            group.sharers.clear()
            self._release(group)
            if group.leader is None:
                del self._groups[group_id]
        return self._kv.pool.num_free > before

    def held_blocks(self) -> list[int]:
        """Every page reference that groups hold; for integrity checks."""
        return [
            block
            for group in self._groups.values()
            if group.shared
            for table in group.shared.block_ids
            for block in table
        ]

    def _group(self, request: Request) -> _Group | None:
        group_id = request.source.group_id
        return self._groups.get(group_id) if group_id is not None else None

    def _shared_tokens(self, request: Request) -> int:
        """Tokens of the prompt's full pages, leaving at least one token to compute."""
        return (request.num_prompt_tokens - 1) // self._kv.block_size * self._kv.block_size

    def _has_computed_prompt(self, leader: Request) -> bool:
        return leader.status is RequestStatus.RUNNING and leader.num_computed_tokens >= leader.num_prompt_tokens

    def _share(self, group: _Group, siblings: list[Request]) -> None:
        if group.shared is None and group.leader is not None:
            hit = self._kv.find_shared(group.leader, self._shared_tokens(group.leader))
            if hit.num_tokens == 0:
                return
            for table in hit.block_ids:
                self._kv.pool.share(table)
            group.shared = hit
        group.sharers.update(sibling.request_id for sibling in siblings)

    def _stop_sharing(self, group: _Group, request: Request) -> None:
        group.sharers.discard(request.request_id)
        if not group.sharers:
            self._release(group)

    def _release(self, group: _Group) -> None:
        hit, group.shared = group.shared, None
        if hit is not None:
            for table in hit.block_ids:
                self._kv.pool.free(reversed(table))


def _have_equal_prompts(one: Request, other: Request) -> bool:
    """Whether two requests' prompts mean the same."""
    return (
        one.num_prompt_tokens == other.num_prompt_tokens
        and one.source.prompt_token_ids == other.source.prompt_token_ids
        and one.source.cache_salt == other.source.cache_salt
    )
