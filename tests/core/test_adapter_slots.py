"""Requests with adapters: each waits for its own alone, places change hands, and nobody waits for ever."""

from random import Random

import pytest
from tests.oracles.scheduler_harness import SchedulerHarness
from tests.oracles.slow_preparer import SlowPreparer

from quire.adapters import LoRARequest
from quire.core.adapter_slots import AdapterSlots
from quire.core.request_state import Request, RequestStatus
from quire.errors import RequestError
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams


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


def hold(slots: AdapterSlots, name: str, number: int) -> Request:
    """A request whose adapter is loaded into a place, and that runs with it."""
    request = Request(EngineRequest(name, [1], SamplingParams(), adapter=adapter(number)), 0, 64)
    if not slots.is_ready(request):
        assert slots.take(request) is not None
        slots.finish(name, failed=False)
    request.adapter_slot = slots.hold(request)
    return request


def test_a_pinned_adapter_keeps_its_place_while_others_change() -> None:
    slots = AdapterSlots(2)
    slots.release(hold(slots, "a", 1))
    slots.pin(1)
    for number in (2, 3, 4):
        slots.release(hold(slots, f"r{number}", number))
    assert [each.lora_int_id for each in slots.loaded()] == [1, 4]
    with pytest.raises(RequestError, match="one place must stay"):
        slots.pin(4)
    with pytest.raises(RequestError, match="add_lora first"):
        slots.pin(3)
    assert slots.remove(1) and not slots.pinned and not slots.remove(1)


def test_an_adapter_that_is_removed_keeps_its_place_for_those_who_hold_it_alone() -> None:
    slots = AdapterSlots(2)
    holder = hold(slots, "a", 1)
    assert slots.remove(1) and slots.loaded() == []
    assert slots.is_ready(holder) and slots.hold(holder) == holder.adapter_slot
    newcomer = hold(slots, "b", 1)
    assert newcomer.adapter_slot != holder.adapter_slot
    third = Request(EngineRequest("c", [1], SamplingParams(), adapter=adapter(3)), 0, 64)
    assert slots.take(third) is None
    slots.release(holder)
    assert slots.take(third) == holder.adapter_slot


def test_an_adapter_that_is_removed_while_it_is_loaded_is_there_for_whom_it_was_loaded() -> None:
    slots = AdapterSlots(1)
    request = Request(EngineRequest("a", [1], SamplingParams(), adapter=adapter(1)), 0, 64)
    assert slots.take(request) == 1
    slots.remove(1)
    slots.finish("a", failed=False)
    assert slots.is_ready(request) and slots.hold(request) == 1
    slots.release(request)
    assert hold(slots, "b", 2).adapter_slot == 1


def test_what_became_of_adapters_is_told_once() -> None:
    slots = AdapterSlots(1)
    assert slots.take_news() is None
    first = hold(slots, "a", 1)
    news = slots.take_news()
    assert news is not None and len(news.load_seconds) == 1 and news.num_evictions == 0
    assert slots.take_news() is None
    slots.release(first)
    hold(slots, "b", 2)
    news = slots.take_news()
    assert news is not None and len(news.load_seconds) == 1 and news.num_evictions == 1
