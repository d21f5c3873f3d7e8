"""The core's loop: what it does with messages, and with the time between them."""

from collections import deque

import pytest
from tests.engine.builders import make_config, process
from tests.oracles.hash_model import HashExecutor

from quire.engine.core import EngineCore
from quire.engine.core_loop import CoreLoop, ThreadInbox
from quire.engine.messages import AbortRequests, AddRequests, FrontendMessage, Outputs, Shutdown, UtilityCall
from quire.errors import EngineError
from quire.sampling_params import SamplingParams


class PreparingExecutor(HashExecutor):
    """Has `num_left` things to prepare, and notes what is called in which order."""

    def __init__(self, config, num_left: int, calls: list[str]) -> None:
        super().__init__(config)
        self.num_left = num_left
        self.calls = calls

    def execute(self, step) -> None:
        self.calls.append("execute")
        super().execute(step)

    def idle(self) -> bool:
        assert not self._in_flight, "prepared with a step in flight"
        self.calls.append("idle")
        self.num_left = max(0, self.num_left - 1)
        return self.num_left > 0


class ScriptedInbox:
    """Gives one batch of messages a call; None stands for a call that finds nothing. Ends with a `Shutdown`."""

    def __init__(self, script: list[list[FrontendMessage] | None], calls: list[str]) -> None:
        self._script = deque(script)
        self._calls = calls

    def interrupt(self) -> None:
        self._calls.append("interrupt")

    def receive(self, block: bool) -> list[FrontendMessage]:
        self._calls.append("wait" if block else "look")
        if not self._script:
            return [Shutdown()] if block else []
        if block:  # a real inbox would sleep until the next message
            while self._script[0] is None:
                self._script.popleft()
        return self._script.popleft() or []


def run(script, num_left: int) -> tuple[list[str], list[Outputs]]:
    config = make_config()
    calls: list[str] = []
    sent: list = []
    core = EngineCore(config, PreparingExecutor(config, num_left, calls))
    CoreLoop(core, ScriptedInbox(script, calls), sent.append).run()
    return calls, [message for message in sent if isinstance(message, Outputs)]


def request(number: int = 0, max_tokens: int = 1) -> AddRequests:
    params = SamplingParams(max_tokens=max_tokens)
    return AddRequests(process(make_config(), [1, 2, 3], params, f"r{number}").engine_requests)


def test_an_idle_core_prepares_until_nothing_is_left_and_then_waits():
    calls, _ = run([], num_left=3)
    assert calls == ["look", "idle", "look", "idle", "look", "idle", "wait"]


def test_a_request_waits_for_one_preparation_at_most():
    calls, sent = run([None, None, [request()]], num_left=100)
    assert calls[:7] == ["look", "idle", "look", "idle", "look", "execute", "look"]
    assert len(sent) == 1


def test_after_work_the_core_asks_again_whether_there_is_something_to_prepare():
    calls, sent = run([None, [request(0)], [request(1)]], num_left=1)
    assert calls == ["look", "idle", "wait", "execute", "look", "execute", "look", "idle", "wait"]
    assert len(sent) == 2


def test_a_sleeping_core_prepares_nothing():
    calls, _ = run([[UtilityCall(1, "sleep", [1])]], num_left=5)
    assert calls == ["look", "wait"]


class DyingExecutor(PreparingExecutor):
    """Its workers end while the core waits for messages."""

    def idle(self) -> bool:
        super().idle()
        if self.calls.count("idle") > 1:
            raise EngineError("rank 1 was killed")
        return False


def test_workers_that_die_while_nothing_is_to_do_end_the_loop():
    config = make_config()
    executor = DyingExecutor(config, 0, [])
    core, inbox = EngineCore(config, executor), ThreadInbox()
    receive = inbox.receive

    def die_and_receive(block: bool) -> list[FrontendMessage]:
        if block and executor.on_failure is not None:
            executor.on_failure()
        return receive(block)

    inbox.receive = die_and_receive  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="rank 1 was killed"):
        CoreLoop(core, inbox, lambda message: None).run()


def test_when_everybody_goes_the_figures_say_so():
    requests = [request(number, max_tokens=50) for number in range(20)]
    everybody = [one.request_id for message in requests for one in message.requests]
    calls, sent = run([list(requests), None, None, [AbortRequests(everybody)], None, [request(99)]], num_left=0)
    told = [message.outputs.stats for message in sent]
    busy, idle, again = told[-3], told[-2], told[-1]
    assert busy.num_running and busy.num_free_blocks < busy.num_total_blocks
    assert (idle.num_running, idle.num_waiting, idle.num_free_blocks) == (0, 0, idle.num_total_blocks)
    assert (idle.num_batched_tokens, again.num_batched_tokens) == (0, 3) and calls.count("execute") == len(sent) - 1
