"""The waiting line: who is admitted next, under three policies.

`fcfs` and `priority` are one queue ordered by rank; `fair` is deficit round robin over tenants. Requests in the background come
last under each of them. Every operation is
O(log n) or better, removal by id included (amortised: removed entries are skipped when they surface, and swept when
they outnumber the living). Knows ranks, tenants and costs; nothing of pages or rows.

Deficit round robin: M. Shreedhar and G. Varghese, "Efficient Fair Queuing using Deficit Round Robin", SIGCOMM 1995. Here
a tenant sits in a heap under the number of the round in which its deficit will have grown to the cost of its first
request, so that finding the next tenant does not walk through rounds in which nobody can be served. A tenant that runs
nothing and comes anew has its turn first, as new flows have in FQ-CoDel (RFC 8290).
"""

import abc
import collections
import heapq
import math

from quire.core.request_state import Request
from quire.errors import ConfigError

FAIR_QUANTUM = 512
"""Tokens that a tenant of weight 1 may spend a round under `fair`: a few ordinary prompts."""

FAIR_ROWS = 7
"""Under `fair` a tenant of weight 1 may run this many times as many requests as rows are free. One alone leaves an eighth of
them to whoever comes next, who would otherwise wait until a request of the first one ends."""


class RequestQueue(abc.ABC):
    """Waiting requests in order of service."""

    @abc.abstractmethod
    def push(self, request: Request) -> None:
        """Add a request, at the place that its rank gives it (a preempted one comes back where it was)."""

    @abc.abstractmethod
    def peek(self) -> Request | None:
        """Who is next; stays the same until something is pushed, popped or removed."""

    @abc.abstractmethod
    def pop(self) -> Request:
        """Take what `peek` showed."""

    @abc.abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out of the line wherever it stands."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def left(self, tenant: str, tokens: int) -> None:
        """A request of a tenant, which was popped and is none in the background, runs no more; it used so many tokens beside its
        prompt."""

    def is_crowded_out(self, request: Request) -> bool:
        """Whether the tenant of a request that waits runs nothing, while another one has most of the rows."""
        return False


class RankedQueue(RequestQueue):
    """Lowest rank first: a heap whose removed entries are skipped when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []
        self._members: set[int] = set()

    def push(self, request: Request) -> None:
        self._sweep()
        self._members.add(request.arrival)
        heapq.heappush(self._heap, (request.rank, request.arrival, request))

    def peek(self) -> Request | None:
        heap = self._heap
        while heap and heap[0][1] not in self._members:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        self._members.discard(request.arrival)
        return request

    def remove(self, request: Request) -> None:
        self._members.remove(request.arrival)
        self._sweep()

    def __len__(self) -> int:
        return len(self._members)

    def _sweep(self) -> None:
        """Drop removed entries when they outnumber the living, so that a removed entry can neither pile up nor, once its
        request is pushed again, be taken for it."""
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)


class _Tenant:
    """One tenant's line and account."""

    __slots__ = ("deficit", "name", "queue", "round", "version", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue = RankedQueue()
        self.weight = 1.0
        self.deficit = 0.0
        self.round = 0
        self.version = 0


class FairQueue(RequestQueue):
    """Deficit round robin over `EngineRequest.tenant`: each round gives every waiting tenant `quantum` tokens to spend, times
    its weight.

    A request costs its prompt when it is admitted and its output as it ends (`left`); one that returns from preemption
    was paid for already. A tenant with nothing waiting has no account. Tenants that have their part of the rows are set aside
    until a request leaves its row.

    Args:
        quantum: tokens a round.
        num_rows: requests that may run at once.
    """

    def __init__(self, quantum: int, num_rows: int = 1 << 30) -> None:
        if quantum < 1:
            raise ConfigError(f"the fair policy's quantum is {quantum} tokens; it must be at least 1")
        self._quantum = quantum
        self._num_rows = self._num_free_rows = num_rows
        self._running: collections.Counter[str] = collections.Counter()
        self._aside: set[str] = set()
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[int, bool, int, str]] = []
        self._round = 0
        self._next_version = 0
        self._length = 0

    def push(self, request: Request) -> None:
        name = request.source.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name)
            tenant.round = self._round
            if not self._running[name]:  # its first prompt need not wait for the end of another one's turn
                tenant.deficit = self._quantum * request.source.tenant_weight
        tenant.weight = request.source.tenant_weight
        first_before = tenant.queue.peek()
        tenant.queue.push(request)
        self._length += 1
        if tenant.queue.peek() is not first_before:
            self._enqueue(tenant)

    def peek(self) -> Request | None:
        tenant = self._next_tenant()
        return tenant.queue.peek() if tenant else None

    def pop(self) -> Request:
        tenant = self._next_tenant()
        if tenant is None:
            raise IndexError("pop from an empty queue")
        ready_round = self._heap[0][0]
        tenant.deficit += (ready_round - tenant.round) * self._quantum * tenant.weight
        tenant.round = self._round = ready_round
        request = tenant.queue.pop()
        tenant.deficit -= request.cost
        request.cost = 0
        self._running[tenant.name] += 1
        self._num_free_rows -= 1
        self._length -= 1
        self._after_removal(tenant)
        return request

    def remove(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.queue.remove(request)
        self._length -= 1
        self._after_removal(tenant)

    def left(self, tenant: str, tokens: int) -> None:
        self._running[tenant] -= 1
        self._num_free_rows += 1
        if not self._running[tenant]:
            del self._running[tenant]
        account = self._tenants.get(tenant)
        if account is not None:
            account.deficit -= tokens
            self._enqueue(account)
        for name in self._aside & self._tenants.keys():
            self._enqueue(self._tenants[name])
        self._aside.clear()

    def is_crowded_out(self, request: Request) -> bool:
        most = max(self._running.values(), default=0)
        return 2 * most > self._num_rows and not self._running[request.source.tenant]

    def __len__(self) -> int:
        return self._length

    def _next_tenant(self) -> _Tenant | None:
        heap = self._heap
        while heap:
            tenant = self._tenants.get(heap[0][3])
            if tenant is not None and tenant.version == heap[0][2]:
                if self._running[tenant.name] < FAIR_ROWS * tenant.weight * self._num_free_rows:
                    return tenant
                self._aside.add(tenant.name)
            heapq.heappop(heap)
        return None

    def _after_removal(self, tenant: _Tenant) -> None:
        if len(tenant.queue):
            self._enqueue(tenant)
        else:
            del self._tenants[tenant.name]

    def _enqueue(self, tenant: _Tenant) -> None:
        """File the tenant under the round in which it can pay for its first request, before those who run something; older
        entries become void."""
        first = tenant.queue.peek()
        assert first is not None
        rounds = max(0, math.ceil((first.cost - tenant.deficit) / (self._quantum * tenant.weight)))
        self._next_version += 1
        tenant.version = self._next_version
        ready = max(tenant.round + rounds, self._round)
        heapq.heappush(self._heap, (ready, self._running[tenant.name] > 0, tenant.version, tenant.name))
        if len(self._heap) > 2 * len(self._tenants) + 16:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[int, bool, int, str]) -> bool:
        tenant = self._tenants.get(entry[3])
        return tenant is not None and tenant.version == entry[2]


class BackgroundLast(RequestQueue):
    """Requests in the background in a line of their own, behind another queue that knows nothing of them: they take no part in
    tenants' shares."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._background = RankedQueue()

    def push(self, request: Request) -> None:
        self._line_of(request).push(request)

    def peek(self) -> Request | None:
        return self._queue.peek() if len(self._queue) else self._background.peek()

    def pop(self) -> Request:
        return self._queue.pop() if len(self._queue) else self._background.pop()

    def remove(self, request: Request) -> None:
        self._line_of(request).remove(request)

    def left(self, tenant: str, tokens: int) -> None:
        self._queue.left(tenant, tokens)

    def is_crowded_out(self, request: Request) -> bool:
        return not request.source.is_background and self._queue.is_crowded_out(request)

    def __len__(self) -> int:
        return len(self._queue) + len(self._background)

    def _line_of(self, request: Request) -> RequestQueue:
        return self._background if request.source.is_background else self._queue
