"""Speculation costs next to nothing where it does not pay, and is found again where it does, on a clock of its own."""

import pytest
from tests.oracles.draft_clock import Device, DraftClock, gain

from quire.config.speculative import SpeculativeConfig
from quire.core.draft_times import GIVEN, DraftTimes

DEVICES = {
    "waits for memory": lambda tokens, rows: 10.0 + 0.05 * tokens,
    "computes": lambda tokens, rows: 1.0 + tokens,
    "something of both": lambda tokens, rows: 2.0 + 0.7 * tokens,
    "has another kernel for several tokens a row": lambda tokens, rows: 4.0 + 2.5 * (tokens > rows) + 0.2 * tokens,
}


def config(method: str) -> SpeculativeConfig:
    keys = {"model": "small", "num_speculative_tokens": 4} if method == "draft_model" else {}
    return SpeculativeConfig(method=method, **keys)


def device(name: str, share: float, chance: float) -> Device:
    """One whose drafter takes such a share of a step for a guess."""
    step_ms = DEVICES[name]
    return Device(step_ms, lambda rows: share * step_ms(rows, rows), noise=0.1, chance=chance)


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("method", "share"), [("ngram", 0.0), ("draft_model", 0.1), ("draft_model", 0.6)])
def test_wrong_guesses_cost_at_most_three_hundredths(name: str, method: str, share: float, num_requests: int) -> None:
    assert gain(device(name, share, 0.0), config(method), num_requests, num_tokens=200) > 0.97


@pytest.mark.parametrize("chance", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_at_no_chance_is_speculation_a_loss(name: str, method: str, chance: float) -> None:
    assert gain(device(name, 0.2, chance), config(method), 8, num_tokens=200) > 0.96


@pytest.mark.parametrize("chance", [0.0, 0.4, 0.7])
@pytest.mark.parametrize("host_ms", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_what_the_host_does_between_steps_with_drafts_counts(num_requests: int, host_ms: float, chance: float) -> None:
    """Other steps overlap: the host plans one while the device computes another."""
    step_ms = DEVICES["waits for memory"]
    slow_host = Device(step_ms, noise=0.1, chance=chance, host_ms=host_ms)
    assert gain(slow_host, config("ngram"), num_requests, num_tokens=300) > 0.96


@pytest.mark.parametrize(("method", "least"), [("ngram", 4.0), ("draft_model", 2.0)])
def test_right_guesses_of_one_request_make_it_faster(method: str, least: float) -> None:
    assert gain(device("waits for memory", 0.1, 0.95), config(method), 1, rounds=2) > least


def test_a_drafter_that_seemed_slow_at_first_is_tried_again() -> None:
    slow = device("waits for memory", 3.0, 0.9)
    clock = DraftClock(slow, config("draft_model"), 1)
    clock.run(1, 400)
    asked = [num_drafts for _, num_drafts in clock.steps]
    assert 0 < sum(count > 0 for count in asked) < 10
    clock.device = device("waits for memory", 0.05, 0.9)  # the machine was busy with something else
    clock.steps.clear()
    clock.run(1, 3000)
    assert sum(num_drafts > 0 for _, num_drafts in clock.steps[-100:]) > 50


def test_guesses_that_become_wrong_are_given_up_and_then_cost_little() -> None:
    clock = DraftClock(device("computes", 0.1, 0.95), config("draft_model"), 1)
    clock.run(1, 300)
    clock.device = device("computes", 0.1, 0.0)
    without = DraftClock(device("computes", 0.1, 0.0), None, 1).run(1, 3000)
    assert clock.run(1, 3000) < 1.03 * without


def test_what_was_gained_may_be_lost_and_little_more() -> None:
    times = DraftTimes()
    for _ in range(10):
        times.book(2.0, 1.0)
    losses = 0
    while not times.is_paused:
        times.book(1.0, 2.0)
        losses += 1
    assert 10 + GIVEN <= losses <= 10 + GIVEN + 1
    rests = 1
    while not times.rest():
        rests += 1
    assert rests >= 100 * GIVEN and not times.is_paused and times.balance == GIVEN
