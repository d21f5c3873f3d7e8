"""A step for which the device had no memory: its requests are computed again in smaller steps, and only they."""

import pytest
from tests.oracles.hash_model import RECURRENT, Faults, HashModel
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.core.step_budget import GOOD_STEPS, StepLimit


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (6, RECURRENT)])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_stream_is_what_it_would_have_been(depth: int, windows: tuple[int, ...], swaps: bool) -> None:
    harness = SchedulerHarness(
        model=HashModel(windows=windows, vocab_size=50),
        faults=Faults(seed=3, lost_step_rate=0.2),
        max_num_batched_tokens=32,
        max_num_seqs=6,
        depth=depth,
        num_host_blocks=40 if swaps else 0,
        preemption_mode="swap" if swaps else "recompute",
    )
    for number in range(8):
        harness.add(f"r{number}", list(range(number, number + 20)), seed=number, max_tokens=12)
    harness.run()  # compares each stream with the oracle's, and looks for lost pages
    assert harness.scheduler.stats().num_preemptions > 0


def test_a_request_that_fits_in_no_step_fails_alone() -> None:
    harness = SchedulerHarness(faults=Faults(seed=1, lost_step_rate=1.0), max_num_batched_tokens=64)
    expected = harness.add("big", list(range(50)), max_tokens=4)
    harness.run()
    assert str(expected.finish) == "error"


def test_steps_get_smaller_and_larger_again() -> None:
    limit = StepLimit(100)
    assert limit.lost(80, num_in_flight=1) and limit.tokens == 40
    assert limit.lost(60) and limit.tokens == 30  # was in flight already
    assert not limit.lost(60) and limit.tokens == 30  # an item that cannot be cut
    assert limit.lost(2) and limit.tokens == 1
    assert not limit.lost(1) and limit.tokens == 1
    for tokens in (2, 4, 8, 16, 32, 64, 100, 100):
        for _ in range(GOOD_STEPS):
            limit.passed()
        assert limit.tokens == tokens
