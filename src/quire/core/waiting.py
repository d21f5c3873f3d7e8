"""The waiting room: every request that has no row, whether it is in the queue or held back.

A request is held back, outside of the queue, while another one computes what both begin with (`common_prefix`), or while
something that it needs is prepared (`preparations`). It then queues again at its own place. Knows nothing of rows or budgets.
"""

from quire.core.common_prefix import CommonPrefixes
from quire.core.kv_cache_manager import KVCacheManager, PrefixHit
from quire.core.preparations import Preparations
from quire.core.queue_bounds import QueueLoad
from quire.core.request_queue import RequestQueue
from quire.core.request_state import Request, RequestStatus
from quire.core.timelines import Timelines
from quire.media import MediaItem


class WaitingRoom:
    """Who waits, and who is next.

    Args:
        queue: orders the requests that could start.
        kv: finds the prefixes that are computed already.
        min_common_tokens: a prompt waits for another that computes at least this much of it.
        timelines: are told who waits for what.

    Attributes:
        preparations: an engine core puts its own here.
        load: the requests that wait, and the tokens known of them.
    """

    def __init__(self, queue: RequestQueue, kv: KVCacheManager, min_common_tokens: int, timelines: Timelines) -> None:
        self._queue = queue
        self._kv = kv
        self._timelines = timelines
        self.prefixes = CommonPrefixes(kv, min_common_tokens)
        self.preparations = Preparations()
        self.load = QueueLoad()

    def __len__(self) -> int:
        return len(self._queue) + self.num_held

    @property
    def num_held(self) -> int:
        """Requests that could not start even if there were room."""
        return len(self.prefixes) + len(self.preparations)

    @property
    def num_queued(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def next(self) -> Request | None:
        """Who is to start next; the same one until something changes."""
        return self._queue.peek()

    def arrive(self, request: Request) -> None:
        """Take in a new request."""
        self.prefixes.arrived(request)
        self._wait(request)

    def come_back(self, request: Request) -> None:
        """A request gave its row back, and waits again."""
        self.left(request, 0)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        self.load.add(request.source.tenant, len(request.token_ids))
        self._push(request)

    def take_ready(self) -> None:
        """Let those queue whose preparation has ended."""
        self._push(*self.preparations.take_ready())

    def find_hit(self, request: Request) -> PrefixHit:
        """The longest prefix that is there already: a sibling's pages, or cached ones."""
        shared = self.prefixes.shared(request)
        cached = self._kv.find_prefix(request)
        return shared if shared is not None and shared.num_tokens >= cached.num_tokens else cached

    def hold_back(self, request: Request, num_cached_tokens: int) -> bool:
        """Whether the next request, which has room, is to wait for another one or for what is prepared: it then does."""
        leader = None if request.is_swapped else self.prefixes.follow(request, num_cached_tokens)
        if leader is not None:
            group_id = request.source.group_id
            is_sibling = group_id is not None and leader.source.group_id == group_id
            cause, other = ("sibling", group_id or "") if is_sibling else ("common prefix", leader.request_id)
        elif self.preparations.must_wait(request):
            cause, other = self.preparations.cause(request), ""
        else:
            return False
        self._hold(request, cause, other)
        return True

    def encode_first(self, request: Request, items: list[MediaItem]) -> None:
        """Hold the next request back until these of its items are computed beside the steps."""
        self.preparations.encode(request, items)
        self._hold(request, "media", "")

    def _hold(self, request: Request, cause: str, other: str) -> None:
        self._queue.remove(request)
        request.status = RequestStatus.HELD
        self._timelines.held(request, cause, other)

    def start(self, request: Request) -> None:
        """The next request gets a row; its pages are attached already."""
        self._queue.pop()
        self.load.remove(request.source.tenant, len(request.token_ids))
        self.prefixes.started(request)

    def computed(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a request that runs are computed."""
        self._push(*self.prefixes.advance(request, num_tokens))

    def lose_leader(self, request: Request) -> None:
        """A request that runs gives its pages back."""
        self._push(*self.prefixes.leave(request, has_ended=False))

    def end(self, request: Request) -> None:
        """A request has ended, wherever it was."""
        if request.row < 0:
            self.preparations.leave(request)
        if request.status is RequestStatus.WAITING:
            self._queue.remove(request)
        if request.status in (RequestStatus.WAITING, RequestStatus.HELD):
            self.load.remove(request.source.tenant, len(request.token_ids))
        self._push(*self.prefixes.leave(request, has_ended=True))

    def left(self, request: Request, num_tokens: int) -> None:
        """A request runs no more; its tenant used so many tokens beside the prompt."""
        if not request.source.is_background:
            self._queue.left(request.source.tenant, num_tokens)

    def is_crowded_out(self, request: Request) -> bool:
        """Whether the tenant of the next request runs nothing beside another one's crowd."""
        return self._queue.is_crowded_out(request)

    def forget_prefixes(self) -> None:
        """Nothing that is computed now will be found."""
        self._push(*self.prefixes.leave_all())

    def _push(self, *requests: Request) -> None:
        for request in requests:
            request.status = RequestStatus.WAITING
            self._timelines.queued(request, len(self._queue))
            self._queue.push(request)
