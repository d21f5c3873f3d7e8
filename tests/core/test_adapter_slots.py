"""Requests with adapters: each waits for its own alone, places change hands, and nobody waits for ever."""

from random import Random

import pytest
from tests.oracles.scheduler_harness import SchedulerHarness
from tests.oracles.slow_preparer import SlowPreparer

from quire.adapters import LoRARequest
from quire.core.request_state import RequestStatus


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, f"folder {number}")


def test_requests_of_a_loaded_adapter_start_while_others_wait_for_one_that_is_being_loaded() -> None:
    preparer = SlowPreparer(ends=1.0)
    harness = SchedulerHarness(preparer=preparer, num_adapters=8, max_num_seqs=8)
    harness.add("first of 1", [1, 1], adapter=adapter(1))
    harness.run()
    preparer._ends = 0.0
    for name in ("first", "second"):
        harness.add(f"{name} of 2", [2, len(name)], adapter=adapter(2))
    harness.step()
    harness.add("another of 1", [1, 3], adapter=adapter(1))
    for _ in range(12):
        harness.step()
    assert harness.expected["another of 1"].finish is not None
    assert harness.scheduler._requests["second of 2"].status is RequestStatus.HELD
    preparer._ends = 1.0
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_places", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_however_few_places_there_are(depth: int, num_places: int, seed: int) -> None:
    random = Random(seed)
    preparer = SlowPreparer(seed, ends=0.2)
    harness = SchedulerHarness(preparer=preparer, num_adapters=num_places, max_num_seqs=4, depth=depth)
    for number in range(40):
        chosen = random.randrange(6)
        fields = {"adapter": adapter(chosen)} if chosen else {}
        harness.add(f"r{number}", [random.randrange(50) for _ in range(random.randint(1, 9))], **fields)
        for _ in range(random.randrange(3)):
            harness.step()
    harness.run()
    assert all(expected.finish is not None for expected in harness.expected.values())
