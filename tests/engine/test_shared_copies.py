"""Copies that share experts start together, end together, and start together again."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.engine.shared_copies import Gathering
from quire.errors import EngineDeadError

PATIENCE_S = 60


def test_copies_start_when_all_can_and_one_that_ends_ends_all() -> None:
    places = iter("abcdef")
    gathering = Gathering(lambda: next(places), 3)
    first, second, third = gathering.seats
    killed: list[int] = []
    with ThreadPoolExecutor(3) as threads:
        for generation, place in enumerate(("a", "c")):
            waiting = [threads.submit(first.join)]
            while not first.place:
                pass
            waiting.append(threads.submit(second.join))
            assert not any(one.done() for one in waiting)
            waiting.append(threads.submit(third.join, "elsewhere"))
            assert [one.result(PATIENCE_S) for one in waiting] == [place] * 3
            for number, seat in enumerate(gathering.seats):
                seat.hold(lambda number=number: killed.append(number))
            assert not killed and [seat.generation for seat in gathering.seats] == [generation] * 3
            assert second.leave()  # the first to end
            assert not first.leave() and not third.leave()
            assert sorted(killed) == [0, 1, 2]
            killed.clear()


def test_a_copy_that_begins_to_start_behind_another_one_s_end_is_ended() -> None:
    gathering = Gathering(lambda: "here", 2)
    first, second = gathering.seats
    killed: list[str] = []
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(seat.join) for seat in gathering.seats]:
            one.result(PATIENCE_S)
    second.leave()
    first.hold(lambda: killed.append("first"))
    assert killed == ["first"]


def test_nobody_waits_for_others_when_the_engine_ends() -> None:
    gathering = Gathering(lambda: "here", 2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(gathering.seats[0].join)
        gathering.close()
        with pytest.raises(EngineDeadError, match="the engine ends"):
            waiting.result(PATIENCE_S)
