"""The places that workers have for adapters: who has one, who is to get one next, and whose turn it is to give one up.

A request that runs holds its adapter's place. An adapter that nobody holds stays until its place is wanted; the one that was
used least recently goes first. Where all places are held, some close: no request of theirs starts that came later than those who
wait for a place, so that these get one. Knows adapters by name; what is in a place is the workers' business.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable
from typing import Any

from quire.adapters import LoRARequest
from quire.core.request_state import Request
from quire.errors import RequestError
from quire.request import AdapterStats


@dataclasses.dataclass
class _Slot:
    """One place. `holders`: requests that run with it, or were prepared for. `used`: when that last changed, as a count.
    `begun`: when its loading began. `closed_from`: the rank from which on requests may not start; None: all may."""

    number: int
    adapter: LoRARequest
    begun: float
    holders: set[str] = dataclasses.field(default_factory=set[str])
    is_loaded: bool = False
    closed_from: tuple[float, ...] | None = None
    used: int = 0

    @property
    def key(self) -> str:
        return self.adapter.key


class AdapterSlots:
    """Which adapter has which place.

    Args:
        count: places; 0 where there are no adapters. They are numbered from 1.

    Attributes:
        pinned: numbers (`lora_int_id`) of adapters that keep their places.
        has_news: something has changed that was not told yet.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._free = list(range(count, 0, -1))
        self._slots: dict[str, _Slot] = {}
        self._dropped: list[_Slot] = []
        self._loading: dict[str, _Slot] = {}
        self._clock = itertools.count(1)
        self.pinned: set[int] = set()
        self._news, self.has_news = AdapterStats(), False

    def __len__(self) -> int:
        """Adapters that have a place."""
        return len(self._slots)

    def is_ready(self, request: Request) -> bool:
        """Whether it may start at once, as far as adapters are concerned."""
        if request.source.adapter is None:
            return True
        slot = self._slot_of(request)
        if slot is None or not slot.is_loaded:
            return False
        return slot.closed_from is None or request.rank < slot.closed_from or request.request_id in slot.holders

    def _slot_of(self, request: Request) -> _Slot | None:
        """The place that a request holds, or else the one that its adapter has now."""
        for slot in self._dropped:
            if request.request_id in slot.holders:
                return slot
        adapter = request.source.adapter
        return None if adapter is None else self._slots.get(adapter.key)

    def hold(self, request: Request) -> int:
        """A request that is ready starts: its adapter's place; 0 without one."""
        if request.source.adapter is None:
            return 0
        slot = self._slot_of(request)
        assert slot is not None
        slot.holders.add(request.request_id)
        self._touch(slot)
        return slot.number

    def _touch(self, slot: _Slot) -> None:
        slot.used, self.has_news = next(self._clock), True

    def release(self, request: Request) -> bool:
        """It does not run any more, or will not start; whether it held a place."""
        slot = self._slot_of(request)
        if slot is None or request.request_id not in slot.holders:
            return False
        slot.holders.discard(request.request_id)
        self._touch(slot)
        self._free_dropped()
        return True

    def take(self, request: Request) -> int | None:
        """A place to load a request's adapter into, which it holds then; None where others hold all, or it is there already."""
        adapter = request.source.adapter
        assert adapter is not None
        if adapter.key in self._slots:
            return None
        if not self._free and not self._evict():
            return None
        slot = _Slot(self._free.pop(), adapter, time.monotonic(), {request.request_id})
        self._slots[adapter.key] = self._loading[request.request_id] = slot
        return slot.number

    def _evict(self) -> bool:
        idle = [slot for slot in self._changeable() if slot.is_loaded and not slot.holders]
        if not idle:
            return False
        victim = min(idle, key=lambda slot: slot.used)
        del self._slots[victim.key]
        self._free.append(victim.number)
        self._news.num_evictions += 1
        self.has_news = True
        return True

    def _changeable(self) -> list[_Slot]:
        return [slot for slot in self._slots.values() if slot.adapter.lora_int_id not in self.pinned]

    def close_for(self, waiting: Iterable[Request]) -> None:
        """Let as many places close as adapters of these requests have none, but at most half of all. Those that are closing go
        first, then those with the fewest holders."""
        firsts: dict[str, tuple[float, ...]] = {}
        for request in waiting:
            adapter = request.source.adapter
            if adapter is not None and adapter.key not in self._slots:
                firsts[adapter.key] = min(firsts.get(adapter.key, request.rank), request.rank)
        ranks = sorted(firsts.values())[: max(1, self._count // 2)]
        held = sorted(self._changeable(), key=lambda slot: (slot.closed_from is None, len(slot.holders), slot.used))
        for number, slot in enumerate(slot for slot in held if slot.is_loaded):
            slot.closed_from = ranks[number] if number < len(ranks) else None

    def finish(self, request_id: str, *, failed: bool) -> None:
        """What a request had loaded is there, or could not be loaded."""
        slot = self._loading.pop(request_id, None)
        if slot is None:
            return
        slot.is_loaded = True
        self._touch(slot)
        if failed:
            slot.holders.discard(request_id)
            self._drop(slot)
            self._news.num_failures += 1
        else:
            self._news.load_seconds.append(time.monotonic() - slot.begun)
        self._free_dropped()

    # Wishes of whoever runs the engine.

    def loaded(self) -> list[LoRARequest]:
        """The adapters that have a place, or are about to."""
        return [slot.adapter for slot in self._slots.values()]

    def remove(self, lora_id: int) -> bool:
        """Adapters of this number have no place any more, except for requests that hold it; whether there were any."""
        slots = [slot for slot in self._slots.values() if slot.adapter.lora_int_id == lora_id]
        for slot in slots:
            self._drop(slot)
        self.pinned.discard(lora_id)
        self._free_dropped()
        return bool(slots)

    def pin(self, lora_id: int) -> None:
        """Adapters of this number keep their place. Raises RequestError: they have none, or no place would be left to change."""
        if all(slot.adapter.lora_int_id != lora_id for slot in self._slots.values()):
            message = f"lora_id is {lora_id}, and no adapter of that number is loaded: add_lora first"
            raise RequestError(message, param="lora_id")
        if len(self.pinned | {lora_id}) >= self._count:
            raise RequestError(
                f"max_loras is {self._count}, and {len(self.pinned)} adapters are pinned: one place must stay for the others",
                param="lora_id",
            )
        self.pinned.add(lora_id)

    def _drop(self, slot: _Slot) -> None:
        """Nobody else gets a place; it is free when nobody holds it."""
        if self._slots.get(slot.key) is slot:
            del self._slots[slot.key]
            self._dropped.append(slot)

    def _free_dropped(self) -> None:
        if self._dropped:
            free = [slot for slot in self._dropped if slot.is_loaded and not slot.holders]
            self._dropped = [slot for slot in self._dropped if slot not in free]
            self._free += [slot.number for slot in free]

    def take_news(self) -> AdapterStats | None:
        """What has changed since this was asked last; None where nothing has."""
        if not self.has_news:
            return None
        news, self._news, self.has_news = self._news, AdapterStats(), False
        return news

    def came(self) -> None:
        """A request with an adapter has come."""
        self.has_news = True

    def describe(self) -> list[dict[str, Any]]:
        """Each place that an adapter has, for an observer."""
        return [
            {
                "name": slot.adapter.lora_name,
                "lora_int_id": slot.adapter.lora_int_id,
                "path": slot.adapter.lora_path,
                "state": "loaded" if slot.is_loaded else "loading",
                "is_pinned": slot.adapter.lora_int_id in self.pinned,
                "num_holders": len(slot.holders),
            }
            for slot in self._slots.values()
        ]

    def forget(self) -> None:
        """The workers have dropped all adapters; nothing runs."""
        pinned = self.pinned
        self.__init__(self._count)
        self.pinned, self.has_news = pinned, True
