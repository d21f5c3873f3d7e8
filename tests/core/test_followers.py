"""Prompts that arrive together and begin alike: what they have in common is computed once."""

import pytest
from tests.oracles.hash_model import Faults, HashModel
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.core.request_state import RequestStatus
from quire.request import FinishReason

COMMON = list(range(100, 132))


def names_of_new(harness: SchedulerHarness, index: int) -> list[str]:
    """Who is admitted by a step."""
    return [request.request_id for request in harness.steps[index].new_requests]


def add_alike(harness: SchedulerHarness, names: str, **fields: object) -> None:
    for name in names:
        harness.add(name, [*COMMON, ord(name)], **{"max_tokens": 2, **fields})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(0,), (0, 48)])
def test_a_common_beginning_is_computed_once(depth: int, windows: tuple[int, ...]) -> None:
    harness = SchedulerHarness(
        model=HashModel(windows=windows),
        block_size=16,
        num_blocks=8000,
        depth=depth,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        min_common_tokens=256,
    )
    harness.check = lambda: None  # type: ignore[method-assign]
    common = [token % 997 for token in range(1024)]
    for index in range(200):
        harness.add(f"r{index}", common + [(index * 131 + token) % 997 for token in range(128)], max_tokens=2)
    harness.run()
    computed = sum(step.total_num_tokens for step in harness.steps)
    assert computed == 1024 + 200 * 128 + 200  # and one decode step each
    assert [len(step.new_requests) for step in harness.steps[:depth]] == [1, 0][:depth]


def test_others_take_the_place_of_those_who_wait_but_not_their_rows() -> None:
    harness = SchedulerHarness(max_num_seqs=4, max_num_batched_tokens=64, depth=2)
    add_alike(harness, "ab")
    for name in "xyz":
        harness.add(name, [ord(name)] * 5, max_tokens=20)
    for _ in range(3):
        harness.step()
    assert [names_of_new(harness, index) for index in range(3)] == [["a", "x", "y"], [], ["b"]]
    harness.run()


def test_followers_keep_their_order_and_their_place_before_later_ones() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=40, max_num_seqs=8)
    add_alike(harness, "abcd")
    harness.step()
    harness.add("late", [1, 2, 3], max_tokens=2)
    harness.step()
    assert names_of_new(harness, 1) == ["b", "c", "d", "late"]
    harness.run()


def test_a_follower_waits_only_while_enough_is_left_to_wait_for() -> None:
    harness = SchedulerHarness(long_prefill_token_threshold=9, max_num_batched_tokens=64)
    add_alike(harness, "ab")
    harness.step()
    assert harness.scheduler._requests["b"].status is RequestStatus.HELD
    while harness.scheduler._requests["b"].status is RequestStatus.HELD:
        assert int(harness.scheduler._batch.collected[0]) <= 18
        harness.step()
    assert int(harness.scheduler._batch.collected[0]) == 27
    harness.run()
    assert harness.expected["b"].num_cached_tokens == 24


@pytest.mark.parametrize("common", [0, 12])
def test_little_in_common_is_not_waited_for(common: int) -> None:
    harness = SchedulerHarness(min_common_tokens=16, max_num_batched_tokens=64)
    for name in "ab":
        harness.add(name, [*COMMON[:common], *[ord(name)] * 10])
    harness.step()
    assert names_of_new(harness, 0) == ["a", "b"]
    harness.run()


@pytest.mark.parametrize("fields", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
def test_who_does_not_read_the_cache_does_not_wait(fields: dict[str, object]) -> None:
    harness = SchedulerHarness(max_num_batched_tokens=128)
    add_alike(harness, "a")
    add_alike(harness, "b", **fields)
    add_alike(harness, "c")
    harness.step()
    assert names_of_new(harness, 0) == ["a", "b"]
    harness.run()


def test_without_the_cache_or_under_another_salt_nobody_waits() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=128, prefix_caching=False)
    add_alike(harness, "ab")
    harness.step()
    assert names_of_new(harness, 0) == ["a", "b"]
    salted = SchedulerHarness(max_num_batched_tokens=128)
    add_alike(salted, "a")
    add_alike(salted, "b", cache_salt="x")
    salted.step()
    assert names_of_new(salted, 0) == ["a", "b"]


def test_nobody_waits_for_one_of_higher_rank_number() -> None:
    harness = SchedulerHarness(policy="priority", max_num_batched_tokens=8)
    add_alike(harness, "a", priority=2)
    harness.step()
    add_alike(harness, "b", priority=0)
    harness.step()
    assert names_of_new(harness, 1) == []  # No budget is left beside a's chunk.
    assert harness.scheduler._requests["b"].status is RequestStatus.WAITING
    harness.run()


@pytest.mark.parametrize("end", ["abort", "reset"])
@pytest.mark.parametrize("depth", [1, 2])
def test_followers_go_on_when_their_leader_cannot_help_them(end: str, depth: int) -> None:
    harness = SchedulerHarness(long_prefill_token_threshold=9, depth=depth)
    add_alike(harness, "abc")
    harness.step()
    assert len(harness.scheduler.waiting.prefixes) == 2
    if end == "abort":
        harness.abort(["a"])
    else:
        harness.scheduler.reset_prefix_cache()
    assert len(harness.scheduler.waiting.prefixes) == 0
    harness.run()
    assert [name for name in "bc" if harness.expected[name].finish is FinishReason.LENGTH] == ["b", "c"]


def test_a_follower_can_be_aborted_while_it_waits() -> None:
    harness = SchedulerHarness(long_prefill_token_threshold=9)
    add_alike(harness, "abc")
    harness.step()
    harness.abort(["b"])
    assert list(harness.scheduler.waiting.prefixes._leader_of) == [harness.scheduler._requests["c"]]
    harness.run()


def test_a_leader_that_fails_is_followed_by_the_next() -> None:
    harness = SchedulerHarness(faults=Faults(seed=1, row_error_rate=0.5), max_num_batched_tokens=64, depth=2)
    add_alike(harness, "abcdefgh")
    harness.run()
    finishes = {expected.finish for expected in harness.expected.values()}
    assert finishes == {FinishReason.ERROR, FinishReason.LENGTH}


def test_a_leader_that_gives_way_lets_its_followers_go() -> None:
    harness = SchedulerHarness(num_blocks=15, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=56, depth=2)
    harness.add("first", [1, 2, 3], max_tokens=40)
    harness.step()
    add_alike(harness, "ab", max_tokens=16)
    harness.run()
    assert harness.num_preemptions > 0


def test_a_long_leader_is_found_by_its_next_page() -> None:
    harness = SchedulerHarness(long_prefill_token_threshold=9, max_num_batched_tokens=64)
    add_alike(harness, "a")
    harness.step()
    harness.step()
    add_alike(harness, "b")  # Finds 16 tokens; the 16 behind them are computed now.
    harness.step()
    assert names_of_new(harness, 2) == []
    harness.run()
    assert harness.expected["b"].num_cached_tokens == 24
