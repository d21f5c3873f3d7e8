"""Several frontends of one core: the real router and channels over sockets, with a core that the test plays."""

import os
import threading

import pytest

from quire.engine.guests import CALL_BITS, GuestChannel, GuestRouter, Seat, first_serial
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    Dead,
    Outputs,
    Ready,
    Utility,
    UtilityCall,
    UtilityResult,
)
from quire.errors import ConfigError, EngineDeadError
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason, SchedulerStats

pytestmark = pytest.mark.timeout(60)


class Heard:
    """Messages as they come, from another thread."""

    def __init__(self):
        self.messages = []
        self.news = threading.Condition()

    def __call__(self, message):
        with self.news:
            self.messages.append(message)
            self.news.notify_all()

    send = __call__  # as a channel's
    ready = Ready(100, 16, 4096)

    def wait_for(self, count):
        with self.news:
            assert self.news.wait_for(lambda: len(self.messages) >= count, 30)
            return self.messages


class House:
    """A router over a core that only listens, and two frontends."""

    def __init__(self, folder):
        self.folder, self.core, self.served = folder, Heard(), Heard()
        self.router = GuestRouter(folder, 2, self.served)
        self.life_fd, self.end = os.pipe()
        self.heard = [Heard(), Heard()]

    def sit_down(self, number):
        return GuestChannel(Seat(str(self.folder), number, self.life_fd), self.heard[number])


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    house.router.attach(house.core)
    house.guests = [house.sit_down(0), house.sit_down(1)]
    yield house
    for guest in house.guests:
        guest.shutdown()
        guest.shutdown()
    house.router.close()


def add(house, number, *names):
    house.guests[number].send(AddRequests([EngineRequest(name, [1, 2]) for name in names]))


def test_each_frontend_gets_the_news_of_its_requests_and_the_first_the_figures(house):
    add(house, 0, "a", "b")
    add(house, 1, "c")
    house.core.wait_for(2)
    ends = [EngineCoreOutput("b", [9], FinishReason.STOP), EngineCoreOutput("c", [8], FinishReason.LENGTH)]
    house.router.on_message(
        Outputs(EngineCoreOutputs(["a", "c", "b", "unknown"], [1, 2, 3, 4], stats=SchedulerStats(3)))
    )
    house.router.on_message(Outputs(EngineCoreOutputs(["a"], [5], outputs=ends)))
    house.router.on_message(Outputs(EngineCoreOutputs(["a", "b", "c"], [6, 6, 6])))  # two of them have ended
    first, second, third = house.heard[0].wait_for(3)
    assert first == Outputs(EngineCoreOutputs(["a", "b"], [1, 3], stats=SchedulerStats(3)))
    assert second == Outputs(EngineCoreOutputs(["a"], [5], outputs=[ends[0]]))
    assert third == Outputs(EngineCoreOutputs(["a"], [6]))
    assert house.heard[1].wait_for(2) == [
        Outputs(EngineCoreOutputs(["c"], [2])),
        Outputs(EngineCoreOutputs(outputs=[ends[1]])),
    ]


def test_every_frontend_learns_what_the_core_settled(house):
    assert [guest.ready for guest in house.guests] == [Ready(100, 16, 4096)] * 2


def test_calls_are_answered_where_they_were_made(house):
    call = UtilityCall((1 << CALL_BITS) + 7, Utility.STATS)
    house.guests[1].send(call)
    assert house.core.wait_for(1) == [call]
    house.router.on_message(UtilityResult(call.call_id, {"x": 1}))
    assert house.heard[1].wait_for(1) == [UtilityResult(call.call_id, {"x": 1})]
    assert not house.heard[0].messages


def test_requests_of_a_dead_frontend_are_aborted_and_those_of_others_go_on(house):
    add(house, 0, "a")
    add(house, 1, "b", "c")
    house.core.wait_for(2)
    assert house.router.forget(1) == 2 and house.router.forget(1) == 0
    assert house.core.wait_for(3)[-1] == AbortRequests(["b", "c"])
    house.router.on_message(Outputs(EngineCoreOutputs(["a", "b"], [1, 2])))
    assert house.heard[0].wait_for(1) == [Outputs(EngineCoreOutputs(["a"], [1]))]


def test_what_a_frontend_aborts_is_forgotten(house):
    add(house, 0, "a")
    house.guests[0].send(AbortRequests(["a"]))
    assert house.core.wait_for(2)[-1] == AbortRequests(["a"])
    assert house.router.forget(0) == 0


def test_a_dead_core_is_told_to_all_and_to_those_who_come_later(house):
    house.router.on_message(Dead("out of memory"))
    for heard in house.heard:
        assert heard.wait_for(1) == [Dead("out of memory")]
    with pytest.raises(EngineDeadError, match="out of memory"):
        house.sit_down(1)


def test_a_frontend_waits_for_the_core_and_says_when_it_serves(tmp_path):
    house = House(tmp_path)
    channels = []
    waiting = threading.Thread(target=lambda: channels.append(house.sit_down(1)))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    house.router.attach(house.core)
    waiting.join(30)
    channels[0].serves()
    assert house.served.wait_for(1) == [1]
    channels[0].shutdown()
    house.router.close()


def test_a_refused_configuration_and_a_dead_parent_are_told_to_those_who_wait(tmp_path):
    house = House(tmp_path)
    house.router.on_message(Dead("too long", is_config_error=True, setting="max_model_len"))
    with pytest.raises(ConfigError, match="too long"):
        house.sit_down(0)
    os.close(house.end)
    with pytest.raises((EngineDeadError, ConfigError)):
        house.sit_down(1)
    house.router.close()


def test_numbers_of_frontends_do_not_meet():
    assert len({first_serial() >> 20 for _ in range(1000)}) == 1000
