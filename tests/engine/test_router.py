"""Several frontends of one core: the real router and clients over sockets, with a core that the test plays."""

import os
import threading

import pytest

from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    Dead,
    Outputs,
    Ready,
    Restarted,
    Restarting,
    Stalled,
    UtilityCall,
    UtilityResult,
)
from quire.engine.router import FrontendRouter, FrontendSlot, RoutedClient, first_serial
from quire.errors import ConfigError, EngineDeadError
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason, SchedulerStats

pytestmark = pytest.mark.timeout(60)


class Heard:
    """Messages as they come, from another thread."""

    def __init__(self):
        self.messages = []
        self.arrived = threading.Condition()

    def __call__(self, message):
        with self.arrived:
            self.messages.append(message)
            self.arrived.notify_all()

    send = __call__  # as a client's
    ready = Ready(100, 16, 4096)

    def wait_for(self, count):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.messages) >= count, 30)
            return self.messages


class Setup:
    """A router over a core that only listens, and two frontends."""

    def __init__(self, folder):
        self.folder, self.core, self.served = folder, Heard(), Heard()
        self.router = FrontendRouter(folder, 2, self.served)
        self.life_fd, self.end = os.pipe()
        self.heard = [Heard(), Heard()]

    def connect(self, number):
        return RoutedClient(FrontendSlot(str(self.folder), number, self.life_fd), self.heard[number])


@pytest.fixture
def setup(tmp_path):
    setup = Setup(tmp_path)
    setup.router.attach(setup.core)
    setup.clients = [setup.connect(0), setup.connect(1)]
    yield setup
    for client in setup.clients:
        client.shutdown()
        client.shutdown()
    setup.router.close()


def add(setup, number, *names):
    setup.clients[number].send(AddRequests([EngineRequest(name, [1, 2]) for name in names]))


def test_every_frontend_is_told_that_the_core_hangs_and_is_started_again(setup):
    for message in (Stalled("stuck"), Restarting("killed"), Restarted()):
        setup.router.on_message(message)
    for heard in setup.heard:
        first, before, after = heard.wait_for(3)[-3:]
        assert isinstance(first, Stalled) and first.message == "stuck"
        assert before.message == "killed" and isinstance(after, Restarted)


def test_each_frontend_gets_the_news_of_its_requests_and_the_first_the_figures(setup):
    add(setup, 0, "a", "b")
    add(setup, 1, "c")
    setup.core.wait_for(2)
    ends = [EngineCoreOutput("b", [9], FinishReason.STOP), EngineCoreOutput("c", [8], FinishReason.LENGTH)]
    setup.router.on_message(
        Outputs(EngineCoreOutputs(["a", "c", "b", "unknown"], [1, 2, 3, 4], stats=SchedulerStats(3)))
    )
    setup.router.on_message(Outputs(EngineCoreOutputs(["a"], [5], outputs=ends)))
    setup.router.on_message(Outputs(EngineCoreOutputs(["a", "b", "c"], [6, 6, 6])))  # two of them have ended
    first, second, third = setup.heard[0].wait_for(3)
    assert first == Outputs(EngineCoreOutputs(["a", "b"], [1, 3], stats=SchedulerStats(3)))
    assert second == Outputs(EngineCoreOutputs(["a"], [5], outputs=[ends[0]]))
    assert third == Outputs(EngineCoreOutputs(["a"], [6]))
    assert setup.heard[1].wait_for(2) == [
        Outputs(EngineCoreOutputs(["c"], [2])),
        Outputs(EngineCoreOutputs(outputs=[ends[1]])),
    ]


def test_every_frontend_learns_what_the_core_settled(setup):
    assert [client.ready for client in setup.clients] == [Ready(100, 16, 4096)] * 2


def test_calls_are_answered_where_they_were_made(setup):
    for client in setup.clients:
        client.send(UtilityCall(7, "stats"))
    first, second = setup.core.wait_for(2)
    assert first.call_id != second.call_id and first.utility == second.utility == "stats"
    by_number = sorted([first.call_id, second.call_id])  # the first frontend's number is lower
    for number, call_id in enumerate(by_number):
        setup.router.on_message(UtilityResult(call_id, number))
    for number, heard in enumerate(setup.heard):
        assert heard.wait_for(1) == [UtilityResult(7, number)]


def test_requests_of_a_dead_frontend_are_aborted_and_those_of_others_go_on(setup):
    add(setup, 0, "a")
    add(setup, 1, "b", "c")
    setup.core.wait_for(2)
    assert setup.router.forget(1) == 2 and setup.router.forget(1) == 0
    assert setup.core.wait_for(3)[-1] == AbortRequests(["b", "c"])
    setup.router.on_message(Outputs(EngineCoreOutputs(["a", "b"], [1, 2])))
    assert setup.heard[0].wait_for(1) == [Outputs(EngineCoreOutputs(["a"], [1]))]


def test_what_a_frontend_aborts_is_forgotten(setup):
    add(setup, 0, "a")
    setup.clients[0].send(AbortRequests(["a"]))
    assert setup.core.wait_for(2)[-1] == AbortRequests(["a"])
    assert setup.router.forget(0) == 0


def test_a_dead_core_is_told_to_all_and_to_those_who_come_later(setup):
    setup.router.on_message(Dead("out of memory"))
    for heard in setup.heard:
        assert heard.wait_for(1) == [Dead("out of memory")]
    with pytest.raises(EngineDeadError, match="out of memory"):
        setup.connect(1)


def test_a_frontend_waits_for_the_core_and_says_when_it_serves(tmp_path):
    setup = Setup(tmp_path)
    clients = []
    waiting = threading.Thread(target=lambda: clients.append(setup.connect(1)))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    setup.router.attach(setup.core)
    waiting.join(30)
    clients[0].serves()
    assert setup.served.wait_for(1) == [1]
    clients[0].shutdown()
    setup.router.close()


def test_a_refused_configuration_and_a_dead_parent_are_told_to_those_who_wait(tmp_path):
    setup = Setup(tmp_path)
    setup.router.on_message(Dead("too long", is_config_error=True, setting="max_model_len"))
    with pytest.raises(ConfigError, match="too long"):
        setup.connect(0)
    os.close(setup.end)
    with pytest.raises((EngineDeadError, ConfigError)):
        setup.connect(1)
    setup.router.close()


def test_numbers_of_frontends_do_not_meet():
    assert len({first_serial() >> 20 for _ in range(1000)}) == 1000
