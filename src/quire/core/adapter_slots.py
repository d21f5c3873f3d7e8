"""The places that workers have for adapters: who has one, who is to get one next, and whose turn it is to give one up.

A request that runs holds its adapter's place. An adapter that nobody holds stays until its place is wanted; the one that was
used least recently goes first. Where all places are held, some close: no further request of theirs starts, so that those who
wait for a place get one. Knows adapters by name; what is in a place is the workers' business.
"""

import dataclasses
import itertools
from collections.abc import Iterable

from quire.core.request_state import Request


@dataclasses.dataclass
class _Slot:
    """One place. `holders`: requests that run with it, or were prepared for. `used`: when that last changed, as a count."""

    number: int
    key: str
    holders: set[str] = dataclasses.field(default_factory=set[str])
    is_loaded: bool = False
    is_closing: bool = False
    used: int = 0


class AdapterSlots:
    """Which adapter has which place.

    Args:
        count: places; 0 where there are no adapters. They are numbered from 1.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._free = list(range(count, 0, -1))
        self._slots: dict[str, _Slot] = {}
        self._loading: dict[str, _Slot] = {}
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        """Adapters that have a place."""
        return len(self._slots)

    def is_ready(self, request: Request) -> bool:
        """Whether it may start at once, as far as adapters are concerned."""
        adapter = request.source.adapter
        if adapter is None:
            return True
        slot = self._slots.get(adapter.key)
        return slot is not None and slot.is_loaded and (not slot.is_closing or request.request_id in slot.holders)

    def hold(self, request: Request) -> int:
        """A request that is ready starts: its adapter's place; 0 without one."""
        adapter = request.source.adapter
        if adapter is None:
            return 0
        slot = self._slots[adapter.key]
        slot.holders.add(request.request_id)
        slot.used = next(self._clock)
        return slot.number

    def release(self, request: Request) -> bool:
        """It does not run any more, or will not start; whether it held a place."""
        adapter = request.source.adapter
        slot = None if adapter is None else self._slots.get(adapter.key)
        if slot is None or request.request_id not in slot.holders:
            return False
        slot.holders.discard(request.request_id)
        slot.used = next(self._clock)
        return True

    def take(self, request: Request) -> int | None:
        """A place to load a request's adapter into, which it holds then; None where others hold all, or it is there already."""
        adapter = request.source.adapter
        assert adapter is not None
        if adapter.key in self._slots:
            return None
        if not self._free and not self._evict():
            return None
        slot = _Slot(self._free.pop(), adapter.key, {request.request_id})
        self._slots[adapter.key] = self._loading[request.request_id] = slot
        return slot.number

    def _evict(self) -> bool:
        idle = [slot for slot in self._slots.values() if slot.is_loaded and not slot.holders]
        if not idle:
            return False
        victim = min(idle, key=lambda slot: slot.used)
        del self._slots[victim.key]
        self._free.append(victim.number)
        return True

    def close_for(self, waiting: Iterable[Request]) -> None:
        """Let as many places close as adapters of these requests have none, but at most half of all. Those that are closing go
        first, then those with the fewest holders."""
        keys = {request.source.adapter.key for request in waiting if request.source.adapter is not None}
        wanted = min(len(keys - self._slots.keys()), max(1, self._count // 2))
        held = sorted(self._slots.values(), key=lambda slot: (not slot.is_closing, len(slot.holders), slot.used))
        for number, slot in enumerate(slot for slot in held if slot.is_loaded):
            slot.is_closing = number < wanted

    def finish(self, request_id: str, *, failed: bool) -> None:
        """What a request had loaded is there, or could not be loaded."""
        slot = self._loading.pop(request_id, None)
        if slot is None:
            return
        slot.is_loaded, slot.used = not failed, next(self._clock)
        if failed:
            del self._slots[slot.key]
            self._free.append(slot.number)

    def forget(self) -> None:
        """The workers have dropped all adapters; nothing runs."""
        self.__init__(self._count)
