"""Requests in the background (lines of batches) run where nobody else wants to, under every policy."""

import pytest
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.core.request_queue import BackgroundLast, FairQueue
from quire.core.request_state import Request, RequestStatus
from quire.request import EngineRequest

PROMPT = list(range(6))
POLICIES = ["fcfs", "priority", "fair"]


def status_of(harness: SchedulerHarness, name: str) -> RequestStatus | None:
    request = harness.scheduler._requests.get(name)
    return None if request is None else request.status


@pytest.mark.parametrize("policy", POLICIES)
def test_others_are_admitted_first_however_late_they_come(policy: str) -> None:
    harness = SchedulerHarness(policy=policy, max_num_seqs=1)  # type: ignore[arg-type]
    harness.add("first", PROMPT, max_tokens=4)
    harness.step()
    for number in range(3):
        harness.add(f"line{number}", [*PROMPT, number], is_background=True, priority=-5)
    harness.add("late", [9, *PROMPT], priority=5)
    harness.run()
    order = [new.request_id for step in harness.steps for new in step.new_requests]
    assert order == ["first", "late", "line0", "line1", "line2"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_runs_gives_its_row_to_another_request(policy: str, depth: int) -> None:
    harness = SchedulerHarness(policy=policy, max_num_seqs=3, depth=depth)  # type: ignore[arg-type]
    for number in range(3):
        harness.add(f"line{number}", [*PROMPT, number], max_tokens=30, is_background=True)
    for _ in range(4):
        harness.step()
    for number in range(2):
        harness.add(f"online{number}", [9, *PROMPT, number], max_tokens=5)
    for _ in range(2 * depth):
        harness.step()
    assert all(status_of(harness, f"online{number}") is RequestStatus.RUNNING for number in range(2))
    harness.run()  # and all end with the oracle's tokens
    assert harness.num_preemptions == 2


def test_one_that_runs_gives_its_pages_to_another_request() -> None:
    harness = SchedulerHarness(num_blocks=17, max_num_seqs=4)
    for number in range(2):
        harness.add(f"line{number}", [number, *range(24)], max_tokens=8, is_background=True)
    for _ in range(4):
        harness.step()
    harness.add("online", [9, *range(30)], max_tokens=4)
    for _ in range(3):
        harness.step()
    assert status_of(harness, "online") is RequestStatus.RUNNING
    harness.run()


def test_a_long_prompt_in_the_background_sits_out_while_another_request_waits() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=8)
    harness.add("line", list(range(50)), max_tokens=2, is_background=True)
    harness.step()
    harness.add("online", [9, *PROMPT], max_tokens=2)
    harness.step()
    assert harness.steps[-1].total_num_tokens == 7 and status_of(harness, "online") is RequestStatus.RUNNING
    harness.run()


def test_those_that_run_do_not_give_way_to_others_in_the_background() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    for number in range(5):
        harness.add(f"line{number}", [*PROMPT, number], is_background=True)
    harness.run()
    assert harness.num_preemptions == 0


def test_tenants_shares_know_nothing_of_the_background() -> None:
    queue = BackgroundLast(FairQueue(10, 8))
    sources = [EngineRequest(str(number), [1], tenant="a", is_background=number < 7) for number in range(8)]
    requests = [Request(source, number, 100) for number, source in enumerate(sources)]
    for request in requests[:7]:
        queue.push(request)
    assert [queue.pop() for _ in range(6)] == requests[:6]
    queue.push(requests[7])
    assert len(queue) == 2 and queue.peek() is requests[7] and queue.pop() is requests[7]
    queue.remove(requests[6])
    assert not len(queue) and queue.peek() is None


def test_a_step_of_a_beam_search_finds_room_in_a_full_queue_and_comes_first() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_num_waiting=1)
    harness.add("first", PROMPT, max_tokens=3)
    harness.step()
    harness.add("waits", [9, *PROMPT], max_tokens=1)
    harness.add("beam", [8, *PROMPT], max_tokens=1, is_continuation=True)
    harness.run()
    assert [new.request_id for step in harness.steps for new in step.new_requests] == ["first", "beam", "waits"]


def test_a_background_prompt_that_sits_out_takes_nobodys_place_among_partial_prompts():
    harness = SchedulerHarness(max_num_partial_prefills=1, max_num_batched_tokens=8)
    harness.add("line", list(range(40)), max_tokens=2, is_background=True)
    harness.step()
    harness.add("live", list(range(50, 80)), max_tokens=2)
    first = harness.step()
    assert [request.request_id for request in first.new_requests] == ["live"]
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_is_lost_when_it_turns_out_that_pages_are_too_few(depth: int) -> None:
    harness = SchedulerHarness(max_num_batched_tokens=8, num_blocks=17, depth=depth)
    harness.add("line", list(range(50)), max_tokens=2, is_background=True)
    for _ in range(5):
        harness.step()
    harness.add("online", [9, *range(40)], max_tokens=2)
    harness.run()  # says if a plan is empty
    assert harness.num_preemptions == 1
