"""How long the waiting line may become: in requests, in tokens, and in predicted seconds; and what a tenant may have of it.

The line is full when the first of the three bounds is met. Under the `fair` policy no tenant may fill it: each one may have at
most as much of it as is left free, times its weight. One alone gets half of the line, two get a third each, and whoever comes
next always finds room. Knows numbers; touches no request.

Dynamic thresholds: A. K. Choudhury and E. L. Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking 6(2), 1998.
"""

import dataclasses
from collections.abc import Callable

from quire.config import SchedulerConfig
from quire.config.limits import DEFAULT_MAX_NUM_WAITING, DEFAULT_MAX_WAITING_TOKENS
from quire.core.cost_model import CostModel
from quire.core.policies import SchedulingPolicy
from quire.errors import CapacityError
from quire.request import EngineRequest, QueueState

TOLD_EVERY_S = 0.1
"""Frontends hear of the queue no more often, unless it has become full, or has room again."""


@dataclasses.dataclass(slots=True)
class Load:
    """Requests, and their tokens."""

    num_requests: int = 0
    num_tokens: int = 0


class QueueLoad:
    """What waits: of all, and of each tenant."""

    def __init__(self) -> None:
        self.total = Load()
        self._tenants: dict[str, Load] = {}

    def of_tenant(self, tenant: str) -> Load:
        """One tenant's part."""
        return self._tenants.get(tenant) or Load()

    def add(self, tenant: str, num_tokens: int) -> None:
        """A request waits."""
        for load in (self.total, self._tenants.setdefault(tenant, Load())):
            load.num_requests += 1
            load.num_tokens += num_tokens

    def remove(self, tenant: str, num_tokens: int) -> None:
        """It waits no more."""
        own = self._tenants[tenant]
        for load in (self.total, own):
            load.num_requests -= 1
            load.num_tokens -= num_tokens
        if not own.num_requests:
            del self._tenants[tenant]


class QueueBounds:
    """Refuses requests for which there is no room in the line, or no time.

    Args:
        config: the bounds. 0 means the built-in limit; for the time, none.
        policy: whether who waits longer starts earlier, and whether tenants have shares.
        load: what waits.
        cost_model: predicts how long.
        cache_tokens: tokens that the KV cache can hold: they limit how many requests run.
        clock: seconds, comparable with `EngineRequest.deadline`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy,
        load: QueueLoad,
        cost_model: CostModel,
        cache_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._load, self._cost_model, self._clock = config, load, cost_model, clock
        self._cache_tokens = cache_tokens
        self._is_fair, self._keeps_order = policy.has_shares, policy.keeps_order
        self._max_requests = config.max_num_waiting or DEFAULT_MAX_NUM_WAITING
        self._max_tokens = config.max_waiting_tokens or DEFAULT_MAX_WAITING_TOKENS
        self._closed: dict[str, float] = {}
        self._empty = self._told = QueueState(self._max_requests)
        self._told_at = 0.0

    def check(self, source: EngineRequest) -> None:
        """Refuse a request for which there is no room in the line, or which would start too late.

        Raises:
            CapacityError: with the seconds after which trying again makes sense.
        """
        delay = self._delay(self._load.total)
        bound = self._broken_bound(source.tenant, source.tenant_weight, len(source.prompt_token_ids), delay)
        if bound:
            self._closed[source.tenant if self._is_fair else ""] = source.tenant_weight
            raise CapacityError(f"the queue is full: {bound}", retry_after=max(1.0, delay))
        left = source.deadline - self._clock() if source.deadline else float("inf")
        ahead = self._delay_before(source, delay)
        if ahead > left:
            left = max(0.0, left)
            message = f"{left:.3g} s are left of the request's timeout; its turn is predicted to come in {ahead:.3g} s"
            raise CapacityError(message, retry_after=max(1.0, ahead - left))

    def news(self) -> QueueState | None:
        """What frontends should hear of the queue; None if they know enough."""
        load, told, now = self._load.total, self._told, self._clock()
        if not load.num_requests and not self._closed:
            self._told = self._empty
            return None if told == self._empty else self._empty
        is_soon = now - self._told_at < TOLD_EVERY_S
        if is_soon and not self._closed and not told.closed:
            return None
        delay = self._delay(load)
        self._closed = {
            tenant: weight for tenant, weight in self._closed.items() if self._broken_bound(tenant, weight, 1, delay)
        }
        closed = list(self._closed)
        if is_soon and closed == told.closed:
            return None
        fullest = self._fullness(load, delay)
        most = int(load.num_requests / fullest) if fullest else self._max_requests
        self._told, self._told_at = QueueState(max(1, most), delay, closed), now
        return self._told

    def _broken_bound(self, tenant: str, weight: float, num_tokens: int, delay: float) -> str:
        """Why one more request of so many tokens is one too many; empty if it is not."""
        load, limit = self._load.total, self._config.max_waiting_time
        if load.num_requests >= self._max_requests:
            return f"{load.num_requests} requests wait; max_num_waiting is {self._max_requests}"
        if load.num_requests and load.num_tokens + num_tokens > self._max_tokens:
            return f"{load.num_tokens} prompt tokens wait; max_waiting_tokens is {self._max_tokens}"
        if 0.0 < limit < delay:
            return f"a request is predicted to wait for {delay:.0f} s; max_waiting_time is {limit:g} s"
        if self._is_fair:
            own, free = self._load.of_tenant(tenant), 1.0 - self._fullness(load, delay)
            if own.num_requests and self._fullness(own, delay * self._part(own)) >= weight * free:
                return f"{own.num_requests} requests of this tenant wait, which is its share beside the others'"
        return ""

    def _fullness(self, load: Load, delay: float) -> float:
        """How much of the line a load takes: 1 is all of it."""
        limit = self._config.max_waiting_time
        in_time = delay / limit if limit > 0.0 else 0.0
        return max(load.num_requests / self._max_requests, load.num_tokens / self._max_tokens, in_time)

    def _part(self, own: Load) -> float:
        return own.num_tokens / self._load.total.num_tokens

    def _delay(self, load: Load) -> float:
        return self._cost_model.predict_queue_delay(
            load.num_requests,
            load.num_tokens,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            cache_tokens=self._cache_tokens,
        )

    def _delay_before(self, source: EngineRequest, delay: float) -> float:
        """Predicted seconds of what is certain to start before this request: where tenants have shares its tenant's own, and
        under another policy that does not keep the order nobody's."""
        if self._keeps_order or not self._load.total.num_requests:
            return delay
        return delay * self._part(self._load.of_tenant(source.tenant)) if self._is_fair else 0.0
