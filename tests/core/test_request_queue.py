import random

import pytest

from quire.config import SchedulerConfig
from quire.core.policies import policy_class
from quire.core.request_queue import FairQueue, RankedQueue
from quire.core.request_state import Request
from quire.errors import ConfigError
from quire.request import EngineRequest


def request(
    arrival: int, *, tenant: str = "", cost: int = 10, rank: tuple[float, ...] | None = None, weight: float = 1.0
) -> Request:
    source = EngineRequest(request_id=str(arrival), prompt_token_ids=[1], tenant=tenant, tenant_weight=weight)
    made = Request(source, arrival, 100)
    made.cost = cost
    made.rank = rank or (arrival,)
    return made


def drain(queue: RankedQueue | FairQueue) -> list[Request]:
    return [queue.pop() for _ in range(len(queue))]


def test_fcfs_serves_in_order_of_arrival_and_takes_a_preempted_request_back_to_its_place() -> None:
    queue = RankedQueue()
    requests = [request(index) for index in range(4)]
    for each in requests:
        queue.push(each)
    assert queue.pop() is requests[0]
    assert queue.pop() is requests[1]
    queue.push(requests[0])
    assert drain(queue) == [requests[0], requests[2], requests[3]]


def test_priority_serves_low_numbers_first_then_arrival() -> None:
    queue = RankedQueue()
    late, early, urgent = request(0, rank=(1, 5.0)), request(1, rank=(1, 2.0)), request(2, rank=(0, 9.0))
    for each in (late, early, urgent):
        queue.push(each)
    assert drain(queue) == [urgent, early, late]


def test_removed_requests_are_never_served_and_leave_nothing_behind() -> None:
    queue = RankedQueue()
    requests = [request(index) for index in range(1000)]
    for each in requests:
        queue.push(each)
    for each in requests[:-1]:
        queue.remove(each)
    assert len(queue) == 1 and len(queue._heap) < 50
    assert queue.peek() is requests[-1]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_an_empty_queue_shows_nothing(policy: str) -> None:
    queue = policy_class(policy)(SchedulerConfig(max_num_seqs=4)).make_queue()
    assert queue.peek() is None and len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()


def test_an_unknown_policy_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy='lottery' is not known; allowed: fair, fcfs, priority"):
        policy_class("lottery")


def test_fair_does_not_let_a_flood_starve_a_neighbour() -> None:
    queue = FairQueue(quantum=20)
    flood = [request(index, tenant="flood") for index in range(500)]
    for each in flood:
        queue.push(each)
    for index in range(500, 510):
        queue.push(request(index, tenant="quiet"))
    served = drain(queue)[:30]
    assert sum(each.source.tenant == "quiet" for each in served) == 10


def test_fair_gives_equal_tokens_whatever_the_sizes_of_requests() -> None:
    queue, tokens = FairQueue(quantum=50), {"large": 0, "small": 0}
    for index in range(100):
        queue.push(request(index, tenant="large", cost=300))
    for index in range(100, 3100):
        queue.push(request(index, tenant="small", cost=10))
    while sum(tokens.values()) < 30_000:
        served_cost = queue.peek().cost  # type: ignore[union-attr]
        served = queue.pop()
        tokens[served.source.tenant] += served_cost
    assert abs(tokens["large"] - tokens["small"]) <= 350


def test_fair_serves_one_tenant_in_its_own_order() -> None:
    queue = FairQueue(quantum=7)
    requests = [request(index, tenant="only", cost=5 * index) for index in range(20)]
    for each in reversed(requests):
        queue.push(each)
    assert drain(queue) == requests


def test_fair_charges_output_tokens_to_whoever_has_more_waiting() -> None:
    queue = FairQueue(quantum=10)
    for index in range(20):
        queue.push(request(index, tenant="writer" if index % 2 else "reader"))
    queue.left(queue.pop().source.tenant, 0)
    queue.left("writer", 50)
    assert [queue.pop().source.tenant for _ in range(5)] == [*["reader"] * 4, "writer"]


def test_fair_survives_removal_at_random_and_serves_everyone_once() -> None:
    generator = random.Random(5)
    queue = FairQueue(quantum=8)
    waiting: dict[int, Request] = {}
    served: list[Request] = []
    for index in range(3000):
        choice = generator.random()
        if choice < 0.5:
            waiting[index] = request(index, tenant=generator.choice("abcde"), cost=generator.randrange(40))
            queue.push(waiting[index])
        elif choice < 0.7 and waiting:
            queue.remove(waiting.pop(generator.choice(list(waiting))))
        elif waiting:
            shown = queue.peek()
            assert queue.pop() is shown
            served.append(shown)
            del waiting[shown.arrival]
        assert len(queue) == len(waiting)
    assert {each.arrival for each in drain(queue)} == set(waiting)
    assert len(served) > 300 and len(queue._heap) < 50


def test_fair_gives_tokens_by_weight() -> None:
    queue, tokens = FairQueue(quantum=50), {"heavy": 0, "light": 0}
    for index in range(2000):
        tenant = "heavy" if index % 2 else "light"
        queue.push(request(index, tenant=tenant, cost=25, weight=3.0 if tenant == "heavy" else 1.0))
    while sum(tokens.values()) < 20_000:
        tokens[queue.pop().source.tenant] += 25
    assert abs(tokens["heavy"] - 3 * tokens["light"]) <= 200


def test_fair_leaves_rows_to_whoever_comes_next_and_gives_them_back() -> None:
    queue = FairQueue(quantum=100, num_rows=16)
    for index in range(40):
        queue.push(request(index, tenant="flood"))
    running = 0
    while queue.peek() is not None:
        queue.pop()
        running += 1
    assert running == 14 and len(queue) == 26
    queue.push(request(100, tenant="quiet"))
    assert queue.pop().source.tenant == "quiet"
    assert queue.peek() is None  # the last row is the next newcomer's
    queue.left("flood", 5)
    assert queue.peek() is not None
    queue.left("quiet", 5)
    assert queue.pop().source.tenant == "flood" and queue.peek() is None


def test_fair_with_one_row_serves_everybody_in_turn() -> None:
    queue = FairQueue(quantum=10, num_rows=1)
    for index in range(6):
        queue.push(request(index, tenant="ab"[index % 2]))
    served: list[str] = []
    while len(queue):
        served.append(queue.pop().source.tenant)
        assert queue.peek() is None
        queue.left(served[-1], 0)
    assert sorted(served[:4]) == ["a", "a", "b", "b"]
