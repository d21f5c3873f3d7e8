"""Requests held back until what they need besides pages is there: a grammar, the kernels of a sampling feature that
nobody has used yet, an adapter, embeddings of media. These are compiled, loaded or computed beside the steps.

Whether something has to be prepared is asked when a request could start. One that has to wait leaves the queue, so that others
overtake it, and queues again, at its own place, when it is ready. What is prepared keeps for a while only; so no more is
prepared ahead than starts soon, and whoever comes too late is held back once more. Knows requests; what is prepared, and where,
is its maker's business.
"""

from typing import Protocol

from quire.core.adapter_slots import AdapterSlots
from quire.core.page_transfers import NoTransfers
from quire.core.request_state import Request
from quire.media import MediaItem
from quire.request import EngineRequest

_MOST_BEGUN = 4
"""Grammars that are compiled at a time: more than are made at once, and few enough to be waited for when a process ends."""
_MOST_AHEAD = 64
"""Requests of higher precedence that are prepared, or nearly, and have not started; makers keep several times as many things."""


class Preparer(Protocol):
    """Who prepares. An executor is one."""

    def is_prepared(self, request: EngineRequest) -> bool:
        """Whether a step may have it at once."""
        ...

    def prepare(self, request: EngineRequest) -> None:
        """Begin; `prepared` tells of the end."""

    def load_adapter(self, request: EngineRequest, slot: int) -> None:
        """Begin to load its adapter into a place that no request holds; `prepared` tells of the end, `problems` of a failure."""

    def fetch_pages(self, request: EngineRequest, names: list[bytes]) -> None:
        """Begin to bring pages to the workers' hosts; `prepared` tells of the end, `problems` of a failure."""

    def encode_media(self, request: EngineRequest, items: list[MediaItem]) -> None:
        """Begin to compute embeddings, behind those that were begun before; `prepared` tells of the end."""

    def problems(self) -> dict[str, str]:
        """Why adapters could not be loaded, by the id of a request that `prepared` has told since the last call."""
        ...

    def prepared(self, wait_s: float) -> list[str]:
        """Ids of requests whose preparation has ended, well or not; waits at most so long for the first."""
        ...


class Preparations:
    """The requests that are held back.

    Args:
        preparer: None: there is never anything to prepare.
        num_adapters: places for adapters.

    Attributes:
        adapters: which of them are where.
        transfers: pages that somebody else has, or is given.
    """

    def __init__(self, preparer: Preparer | None = None, num_adapters: int = 0) -> None:
        self._preparer = preparer
        self.adapters = AdapterSlots(num_adapters)
        self.transfers = NoTransfers()
        self._fetching: set[str] = set()
        self._refused: list[tuple[Request, str]] = []
        self._line: dict[str, Request] = {}
        self._begun: dict[str, Request] = {}
        self._ready: dict[str, Request] = {}
        self._ahead: dict[str, Request] = {}

    def __len__(self) -> int:
        """Requests held back."""
        return len(self._line) + len(self._begun) + len(self._ready)

    def must_wait(self, request: Request) -> bool:
        """Whether a request that is about to start is to be held back instead; it then is."""
        if self._preparer is None:
            return False
        if self._is_ready(request):
            request.adapter_slot = self.adapters.hold(request)
            if self._forget(request):
                self._begin()
            return False
        self._ahead.pop(request.request_id, None)
        self._line[request.request_id] = request
        self._begin()
        return True

    def encode(self, request: Request, items: list[MediaItem]) -> None:
        """Hold a request back until these are computed."""
        assert self._preparer is not None
        self._begun[request.request_id] = request
        self._preparer.encode_media(request.source, items)

    def _is_ready(self, request: Request) -> bool:
        return self.adapters.is_ready(request) and not request.awaits_pages and self._is_prepared(request)

    def _is_prepared(self, request: Request) -> bool:
        assert self._preparer is not None
        return request.source.sampling_params is None or self._preparer.is_prepared(request.source)

    def cause(self, request: Request) -> str:
        """What a request that is held back waits for."""
        if not self.adapters.is_ready(request):
            return "adapter"
        if request.awaits_pages:
            return "pages"
        return "grammar" if self.has_grammar(request) else "kernels"

    @staticmethod
    def has_grammar(request: Request) -> bool:
        """Whether a grammar has to be compiled for it, which takes a thread's time."""
        params = request.source.sampling_params
        return params is not None and params.structured_outputs is not None

    def take_ready(self) -> list[Request]:
        """Requests that may queue again."""
        if self._begun:
            self._take_in(0.0)
        ready = list(self._ready.values())
        self._ready.clear()
        return ready

    def take_refused(self) -> list[tuple[Request, str]]:
        """Requests whose adapter cannot be loaded, and why."""
        refused, self._refused = self._refused, []
        return refused

    def wait(self, seconds: float) -> bool:
        """Nothing else is to be done: wait until one of them is ready, but not longer. Whether there is any."""
        if self._begun and not self._ready:
            self._take_in(seconds)
        return len(self) > 0

    def leave(self, request: Request) -> None:
        """A request has ended, wherever it was, or has given its row back: somebody else's turn may have come."""
        self.transfers.leave(request)
        was_here, has_released = self._forget(request), self.adapters.release(request)
        if was_here or has_released:
            self._begin()

    def _forget(self, request: Request) -> bool:
        """Whether it was held back, or was prepared and had not started; it no longer is."""
        places = (self._line, self._begun, self._ready, self._ahead)
        found = [place.pop(request.request_id, None) for place in places]
        return any(found)

    def _take_in(self, wait_s: float) -> None:
        assert self._preparer is not None
        prepared, problems = self._preparer.prepared(wait_s), self._preparer.problems()
        for request_id in prepared:
            self.adapters.finish(request_id, failed=request_id in problems)
            request = self._begun.pop(request_id, None)
            if request_id in self._fetching:
                self._fetching.remove(request_id)
                problem = problems.pop(request_id, None)
                self.transfers.ended(request_id, problem)
                if request is not None:
                    self.transfers.fetched(request, problem)
            if request is not None and request_id in problems:
                self._refused.append((request, problems[request_id]))
            elif request is not None:
                self._ready[request_id] = self._ahead[request_id] = request
        for request_id in self.transfers.late():
            if (request := self._begun.pop(request_id, None)) is not None:
                self.transfers.give_up(request)
                self._ready[request_id] = self._ahead[request_id] = request
        self._begin()

    def _begin(self) -> None:
        """Begin what may be begun, in the order of precedence. What has become known meanwhile is ready."""
        if self._preparer is None:
            return
        self.adapters.close_for(self._line.values())
        for request in sorted(self._line.values(), key=lambda one: one.rank):
            if not self.adapters.is_ready(request):
                self._begin_loading(request)
                continue
            if request.awaits_pages:
                self._begun[request.request_id] = self._line.pop(request.request_id)
                self._fetching.add(request.request_id)
                self._preparer.fetch_pages(request.source, self.transfers.names(request))
                continue
            if self.has_grammar(request) and (
                sum(map(self.has_grammar, self._begun.values())) >= _MOST_BEGUN
                or self._num_before(request) >= _MOST_AHEAD
            ):
                continue
            del self._line[request.request_id]
            if self._is_prepared(request):
                self._ready[request.request_id] = request
            else:
                self._begun[request.request_id] = request
                self._preparer.prepare(request.source)

    def _begin_loading(self, request: Request) -> None:
        """Have a request's adapter loaded, if there is a place for it."""
        assert self._preparer is not None
        slot = self.adapters.take(request)
        if slot is not None:
            del self._line[request.request_id]
            self._begun[request.request_id] = request
            self._preparer.load_adapter(request.source, slot)

    def _num_before(self, request: Request) -> int:
        return sum(other.rank < request.rank for other in (*self._begun.values(), *self._ahead.values()))
