"""Scheduling policies by name: who is served first, and who keeps its pages when they run out.

A policy ranks requests, may put them in a queue of its own, hold back who comes next, and make steps smaller. Plugins register
further ones. A policy decides the order, not the rules: budgets, pages and bounds hold under every policy.
Knows requests as they arrive. Knows nothing of rows or pages.
"""

from quire.config import SchedulerConfig
from quire.core.request_queue import FAIR_QUANTUM, BackgroundLast, FairQueue, RankedQueue, RequestQueue
from quire.plugins.registry import Registry
from quire.request import EngineRequest

SETTING = "scheduling_policy"


class SchedulingPolicy:
    """First come, first served; the base of other policies. One instance serves one scheduler.

    Attributes:
        keeps_order: who comes later never starts earlier, so that a wait can be predicted.
        has_shares: tenants have shares of the waiting line, too: one tenant cannot fill it.
    """

    keeps_order = True
    has_shares = False

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    def rank(self, request: EngineRequest, arrival: int) -> tuple[float, ...]:
        """A request's place: a lower one is served earlier, and gives its pages up later. It is asked for once, as the request
        arrives. All requests' ranks have the same length, and no two are equal: `arrival`, which counts requests, is a good end.
        Background requests come after all others whatever their rank."""
        return (-1 if request.is_continuation else arrival,)

    def may_admit(self, request: EngineRequest, num_running: int) -> bool:
        """Whether the queue's head may start in this step, pages and rows permitting, beside so many that run. Asked for each
        request that could start; not while nothing runs, so that none waits for ever."""
        return True

    def step_tokens(self, limit: int, num_running: int) -> int:
        """Tokens that the next step may have, at most `limit` (`max_num_batched_tokens`, or less where memory was short)."""
        return limit

    def make_queue(self) -> RequestQueue:
        """The queue of waiting requests, which gives out the best one; ordered by rank unless a policy has another."""
        return RankedQueue()


class PriorityPolicy(SchedulingPolicy):
    """The lowest `priority` first, then the earliest."""

    keeps_order = False

    def rank(self, request: EngineRequest, arrival: int) -> tuple[float, ...]:
        return (request.priority, request.arrival_time, arrival)


class FairPolicy(SchedulingPolicy):
    """Deficit round robin over tenants."""

    keeps_order = False
    has_shares = True

    def make_queue(self) -> RequestQueue:
        return BackgroundLast(FairQueue(FAIR_QUANTUM, self.config.max_num_seqs))


POLICIES: Registry[type[SchedulingPolicy]] = Registry(
    "scheduling policy", SETTING, {"fcfs": SchedulingPolicy, "priority": PriorityPolicy, "fair": FairPolicy}
)


def policy_class(name: str) -> type[SchedulingPolicy]:
    """The policy of a name, or of a class path `module:Class`.

    Raises:
        ConfigError: there is none.
    """
    return POLICIES.find_class(name, SchedulingPolicy)
