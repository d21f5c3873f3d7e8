"""Requests whose form is being prepared: others overtake them, and each starts when its own is ready."""

import pytest
from tests.oracles.scheduler_harness import SchedulerHarness
from tests.oracles.slow_preparer import SlowPreparer

from quire.core import preparations
from quire.core.request_state import RequestStatus
from quire.sampling_params import StructuredOutputsParams

NEVER = 0.0


def make(**settings: object) -> tuple[SchedulerHarness, SlowPreparer]:
    preparer = SlowPreparer(ends=NEVER)
    return SchedulerHarness(preparer=preparer, **settings), preparer  # type: ignore[arg-type]


def form(regex: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=regex)


def started(harness: SchedulerHarness) -> list[int]:
    """The prompts' first tokens, in the order in which their requests started."""
    return [new.token_ids[0] for step in harness.steps for new in step.new_requests]


@pytest.mark.parametrize("depth", [1, 2])
def test_others_overtake_a_new_form_and_a_known_form_does_too(depth: int) -> None:
    harness, preparer = make(depth=depth)
    preparer.known.add("known")
    harness.add("new", [1, 1, 1], structured_outputs=form("new"))
    harness.add("plain", [2, 2, 2], max_tokens=30)
    harness.add("known", [3, 3, 3], structured_outputs=form("known"))
    for _ in range(12):
        harness.step()
    assert started(harness) == [2, 3] and harness.expected["known"].finish is not None
    assert harness.scheduler.num_waiting == 1 and harness.scheduler.has_unfinished()
    preparer.released.add("new")
    harness.run()
    assert started(harness) == [2, 3, 1]


def test_one_that_is_ready_stands_at_its_own_place_again() -> None:
    harness, preparer = make(max_num_seqs=1)
    harness.add("new", [1], structured_outputs=form("new"), max_tokens=4)
    harness.add("running", [2], max_tokens=6)
    harness.step()
    harness.add("late", [3], max_tokens=4)
    preparer._ends = 1.0
    harness.run()
    assert started(harness) == [2, 1, 3]


def test_whoever_goes_while_its_form_is_prepared_leaves_nothing_and_delays_nobody() -> None:
    harness, preparer = make()
    for number in range(10):
        harness.add(f"r{number}", [number], structured_outputs=form(f"form {number}"))
    harness.step()
    assert preparer.order == ["r0", "r1", "r2", "r3"]
    harness.abort(["r9", "r5", "r0", "r2"])
    assert preparer.order[4:] == ["r4", "r6"]  # two places came free
    preparer._ends = 1.0
    harness.run()
    assert sorted(started(harness)) == [1, 3, 4, 6, 7, 8]


def test_an_id_that_is_used_again_waits_for_its_own_form() -> None:
    harness, preparer = make()
    harness.add("r", [1], structured_outputs=form("first"))
    harness.step()
    harness.abort(["r"])
    del harness.expected["r"]
    first = dict(preparer.begun)
    harness.add("r", [2], structured_outputs=form("second"))
    harness.step()
    assert first == {"r": "first"} and preparer.begun == {"r": "second"}
    preparer.begun["r"] = "first"  # the first one's end comes late
    preparer._ends = 1.0
    harness.step()
    harness.run()
    assert started(harness) == [2] and "second" in preparer.known


@pytest.mark.parametrize("leaves", [False, True])
def test_siblings_wait_together(leaves: bool) -> None:
    harness, preparer = make()
    for number in range(3):
        harness.add(f"r{number}", [7, 7, 7, 7, 7], structured_outputs=form("a"), group_id="g", seed=number)
    harness.step()
    assert {request.status for request in harness.scheduler._requests.values()} == {RequestStatus.HELD}
    if leaves:
        harness.abort(["r0"])
        harness.step()
    preparer._ends = 1.0
    harness.run()
    assert len(started(harness)) == 3 - leaves and set(preparer.order) == {"r0", "r1", "r2"}


def test_a_form_that_was_forgotten_while_its_request_queued_is_prepared_again() -> None:
    harness, preparer = make(max_num_seqs=1)
    harness.add("first", [1], max_tokens=3)
    harness.step()
    preparer.known.add("a")
    harness.add("second", [2], structured_outputs=form("a"))
    preparer.known.clear()
    preparer._ends = 1.0
    harness.run()
    assert preparer.order == ["second"]


def test_no_more_is_prepared_ahead_than_starts_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations, "_MOST_AHEAD", 6)
    harness, preparer = make(max_num_seqs=2)
    preparer._ends = 1.0
    for number in range(40):
        harness.add(f"r{number}", [number], structured_outputs=form(f"form {number}"), max_tokens=5)
    for _ in range(3):
        harness.step()
    assert 6 <= len(preparer.order) <= 10
    harness.run()
    assert started(harness) == list(range(40)) and preparer.most_begun <= 4


def test_one_of_higher_precedence_is_not_kept_waiting_by_those_who_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparations, "_MOST_AHEAD", 2)
    harness, preparer = make(max_num_seqs=1, policy="priority")
    preparer._ends = 1.0
    for number in range(8):
        harness.add(f"low{number}", [number], structured_outputs=form(f"form {number}"), priority=5)
    harness.step()
    harness.step()
    for number in range(3):
        harness.add(f"plain{number}", [20 + number], priority=1, max_tokens=3)
    harness.add("high", [30], structured_outputs=form("high"), priority=0)
    harness.run()
    order = started(harness)
    assert order.index(30) <= 2  # behind the one that ran, and one that took the row while the form was prepared


def test_many_requests_with_one_new_form_prepare_it_few_times() -> None:
    harness, preparer = make(max_num_seqs=4)
    for number in range(30):
        harness.add(f"r{number}", [number], structured_outputs=form("a"), max_tokens=2)
    harness.step()
    assert len(preparer.order) == 4
    preparer._ends = 1.0
    harness.run()
    assert len(preparer.order) == 4 and started(harness) == list(range(30))


def test_waiting_for_a_form_alone_ends_when_it_is_ready() -> None:
    harness, preparer = make()
    harness.add("r", [1], structured_outputs=form("a"))
    assert not harness.scheduler.waiting.preparations.wait(0.0)
    harness.step()
    assert not preparer.known and harness.scheduler.waiting.preparations.wait(1.0) and preparer.known == {"a"}
    harness.run()
    assert not harness.scheduler.waiting.preparations.wait(0.0)


def test_requests_that_wait_for_a_feature_are_all_begun_and_keep_no_form_from_being_prepared() -> None:
    harness, preparer = make()
    for number in range(6):
        harness.add(f"r{number}", [number, number], logprobs=1)
    harness.add("form", [7], structured_outputs=form("new"))
    harness.add("plain", [9, 9], max_tokens=30)
    harness.step()
    assert len(preparer.begun) == 7 and started(harness) == [9]
    preparer.released.add("form")
    harness.step()
    harness.step()
    assert started(harness) == [9, 7]
    preparer.released.add("r0")  # what one waited for is there for all
    preparer._ends = 1.0
    harness.run()
    assert sorted(started(harness)) == [0, 1, 2, 3, 4, 5, 7, 9]
