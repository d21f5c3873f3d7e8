"""Copies that share experts take all steps together: none waits for ever for another one, whatever is sent to whom, and none
works while nobody has work. Cores are threads here, with the loop, the client and the words of real ones."""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.distributed.thread_ranks import ThreadRanks
from tests.engine.builders import make_config
from tests.oracles.hash_model import HashExecutor

from quire.config import EngineConfig
from quire.config.engine import SharingCopies
from quire.core.output import SchedulerOutput, Turn
from quire.engine import messages
from quire.engine.core_client import ThreadClient
from quire.engine.data_parallel import CopiesClient, config_of_copy
from quire.request import EngineRequest, token_array
from quire.sampling_params import SamplingParams
from quire.worker.shared_steps import SharedSteps

PATIENCE_S = 60
DESKS: dict[str, tuple[threading.Barrier, dict[int, Any], list["SharingExecutor"]]] = {}


class SharingExecutor(HashExecutor):
    """Says a word to the other copies in each step, as a worker does."""

    def __init__(self, config: EngineConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        parallel = config.parallel
        assert parallel.sharing is not None
        barrier, sent, executors = DESKS[parallel.sharing.rendezvous]
        ranks = ThreadRanks(parallel.data_parallel_rank, parallel.data_parallel_size, barrier, sent)
        self.shared, self.turns = SharedSteps(ranks, [], torch.device("cpu")), list[Turn]()
        executors.append(self)

    def execute(self, step: SchedulerOutput) -> None:
        self.shared.begin(Turn.COMPUTES)
        self.turns.append(Turn.COMPUTES)
        super().execute(step)

    def collective_rpc(
        self, method: Any, args: Any = (), kwargs: Any = None, timeout: float | None = None
    ) -> list[Any]:
        if method != "take_part":
            return super().collective_rpc(method, args, kwargs, timeout)
        self.turns.append(Turn(args[0]))
        return [self.shared.begin(*args)[1]]


class Copies:
    """Some copies behind one client, and what has come of them."""

    def __init__(self, count: int, barrier: threading.Barrier) -> None:
        self.executors: list[SharingExecutor] = []
        self.is_ending = False
        name = f"{id(self)}"
        DESKS[name] = (barrier, {}, self.executors)
        config = make_config(max_model_len=200, executor=f"{__name__}:SharingExecutor", min_prefill_tokens=1)
        sharing = SharingCopies(name, 0, count)
        parallel = {"enable_expert_parallel": True, "data_parallel_size": count, "sharing": sharing}
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))
        self.lengths: dict[str, int] = {}
        self.results: dict[int, concurrent.futures.Future[Any]] = {}
        self._ended, self._all_ended = set[str](), threading.Condition()
        starts = [
            lambda hear, number=number: ThreadClient(config_of_copy(config, number), hear) for number in range(count)
        ]
        gathering: Any = SimpleNamespace(close=lambda: None)
        self.client = CopiesClient(starts, self._hear, gathering)

    def _hear(self, message: messages.CoreMessage) -> None:
        match message:
            case messages.Outputs(outputs=outputs):
                with self._all_ended:
                    for request_id in outputs.plain_ids:
                        self.lengths[request_id] += 1
                    for output in outputs.outputs:
                        self.lengths[output.request_id] += len(output.new_token_ids)
                        if output.finish_reason is not None:
                            self._ended.add(output.request_id)
                            self._all_ended.notify()
            case messages.UtilityResult(call_id=call_id):
                self.results[call_id].set_result(message)
            case messages.Dead(message=text) if not self.is_ending:
                raise AssertionError(text)
            case _:
                pass

    def add(self, copy: int, length: int) -> None:
        name = f"r{len(self.lengths)}"
        self.lengths[name] = 0
        params = SamplingParams(max_tokens=length, seed=1, ignore_eos=True)
        request = EngineRequest(
            name, token_array([5, 6, 7]), sampling_params=params, copy=copy % len(self.client.clients)
        )
        self.client.send(messages.AddRequests([request]))

    def call(self, name: str, *args: Any) -> Any:
        number = len(self.results)
        self.results[number] = concurrent.futures.Future()
        self.client.send(messages.UtilityCall(number, name, list(args)))
        return self.results[number].result(PATIENCE_S).get()

    def wait(self) -> None:
        with self._all_ended:
            assert self._all_ended.wait_for(lambda: len(self._ended) == len(self.lengths), PATIENCE_S)


@contextlib.contextmanager
def copies(count: int) -> Iterator[Copies]:
    barrier = threading.Barrier(count, timeout=PATIENCE_S)
    several = Copies(count, barrier)
    try:
        yield several
    finally:
        several.is_ending = True
        barrier.abort()
        several.client.shutdown()


def test_a_copy_without_requests_takes_part_in_every_step_and_rests_when_all_do() -> None:
    with copies(3) as several:
        several.add(1, 20)
        several.wait()
        assert several.lengths == {"r0": 20}
        assert several.call("pause_state") == "running"
        turns = [
            executor.turns for executor in sorted(several.executors, key=lambda each: each.config.parallel.copy_number)
        ]
        assert [each.count(Turn.COMPUTES) for each in turns] == [0, 20, 0]
        assert turns[0].count(Turn.NOTHING) >= 20 and turns[2].count(Turn.NOTHING) >= 20


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_whatever_is_sent_to_whom_all_ends(data: st.DataObject) -> None:
    with copies(data.draw(st.integers(2, 3), "copies")) as several:
        for _ in range(data.draw(st.integers(1, 8), "messages")):
            match data.draw(st.sampled_from(("add", "add", "wait", "pause", "sleep", "reset", "stats"))):
                case "add":
                    several.add(data.draw(st.integers(0, 2), "copy"), data.draw(st.integers(1, 30), "length"))
                case "wait":
                    several.wait()
                case "pause":
                    several.call("pause", "keep", False)
                    several.add(0, 3)
                    several.call("resume")
                case "sleep":
                    several.call("sleep", 1, "keep")
                    several.call("wake_up")
                case "reset":
                    several.call("reset_prefix_cache", True)
                case _:
                    several.call("stats")
        several.wait()
        turns = [executor.turns for executor in several.executors]
        assert len({len(each) for each in turns}) <= 2


@pytest.mark.parametrize(
    ("words", "is_computed", "may_leave"),
    [
        ([(Turn.NOTHING, 3), (Turn.NOTHING, 3)], False, True),
        ([(Turn.NOTHING, 3), (Turn.NOTHING, 4)], False, False),
        ([(Turn.NOTHING, 3), (Turn.WAITS_FOR_WORK, 3)], False, False),
        ([(Turn.NOTHING, 3), (Turn.WAITS_FOR_ALL, 3)], False, False),
        ([(Turn.WAITS_FOR_ALL, 3), (Turn.WAITS_FOR_ALL, 4)], False, True),
        ([(Turn.WAITS_FOR_ALL, 3), (Turn.COMPUTES, 0)], True, False),
    ],
)
def test_what_a_step_s_words_mean(words: list[tuple[Turn, int]], is_computed: bool, may_leave: bool) -> None:
    barrier, sent = threading.Barrier(2, timeout=PATIENCE_S), dict[int, Any]()

    def say(rank: int) -> tuple[bool, bool]:
        return SharedSteps(ThreadRanks(rank, 2, barrier, sent), [], torch.device("cpu")).begin(*words[rank])

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(say, range(2))) == [(is_computed, may_leave)] * 2
