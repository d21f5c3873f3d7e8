"""Copies of an engine core behind one client: requests are spread, deaths are survived, calls reach all."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.engine.builders import make_config
from tests.engine.test_async_llm import collect, oracle, sampling, tokens_of
from tests.oracles.hash_model import HashExecutor

from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.data_parallel import CopiesClient
from quire.engine.llm_engine import LLMEngine
from quire.engine.shared_copies import Gathering
from quire.errors import ConfigError, EngineDeadError, EngineError, RequestError
from quire.metrics.events import EventKind
from quire.metrics.prometheus import PrometheusExposition, cache_info
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason, QueueState, SchedulerStats
from quire.sampling_params import RequestOutputKind


class RefusingExecutor(HashExecutor):
    """Its second copy does not start."""

    def __init__(self, config: EngineConfig, *arguments: Any, **options: Any) -> None:
        if config.parallel.data_parallel_rank == 1:
            raise ConfigError("the second copy has no device", setting="device")
        super().__init__(config, *arguments, **options)


def copies_config(num_copies: int = 2, **settings: Any) -> EngineConfig:
    config = make_config(max_model_len=2000, num_blocks=3000, **settings)
    parallel = dataclasses.replace(config.parallel, data_parallel_size=num_copies)
    return dataclasses.replace(config, parallel=parallel)


@contextlib.asynccontextmanager
async def an_engine(**settings: Any):
    engine = AsyncLLM.from_engine_config(copies_config(**settings))
    try:
        yield engine
    finally:
        engine.shutdown()


def pids(engine: AsyncLLM) -> list[int]:
    return [copy.client.pid for copy in engine._client.clients]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_two_copies_answer_as_one_and_share_the_work() -> None:
    async def main() -> None:
        async with an_engine() as engine:
            assert len(set(pids(engine))) == 2
            results = await asyncio.gather(
                *(
                    collect(engine.generate([5, i], sampling(max_tokens=30, seed=i, n=1 + i % 2), str(i)))
                    for i in range(12)
                )
            )
            for i, outputs in enumerate(results):
                assert outputs[-1].outputs[0].token_ids == oracle([5, i], 30, i)
            steps = [copy.counts["engine_steps"] for copy in engine.metrics.copies]
            assert min(steps) >= 30 and engine.metrics.counts["engine_steps"] == sum(steps)
            assert engine.metrics.num_running == 0
            text = PrometheusExposition(engine.metrics, cache_info(engine.config.cache)).exposition()[0].decode()
            assert f'quire:engine_steps_total{{engine="1",model_name="hash"}} {float(steps[1])}' in text
            ended = [copy.success["length"] for copy in engine.metrics.copies]
            assert sum(ended) == engine.metrics.success["length"] == 18 and min(ended) > 0
            assert [copy.counts["generation_tokens"] for copy in engine.metrics.copies] == [
                30 * count for count in ended
            ]
            assert f'engine="1",finished_reason="length",model_name="hash"}} {float(ended[1])}' in text
            assert f'quire:e2e_request_latency_seconds_count{{engine="0",model_name="hash"}} {float(ended[0])}' in text
            assert await engine.reset_prefix_cache() is True
            assert await engine.is_paused() is False

    run(main())


def test_streams_of_killed_copies_end_with_the_oracles_tokens_while_the_other_copy_serves() -> None:
    async def main() -> None:
        async with an_engine() as engine:
            lengths = [300 + 40 * i for i in range(8)]
            params = [
                sampling(max_tokens=length, seed=i, output_kind=RequestOutputKind.DELTA)
                for i, length in enumerate(lengths)
            ]
            streams = [engine.generate([5, i], params[i], str(i)) for i in range(8)]
            firsts = [await anext(stream) for stream in streams]
            tasks = [asyncio.ensure_future(collect(stream)) for stream in streams]
            for number in (0, 1):
                before = pids(engine)[number]
                os.kill(before, signal.SIGKILL)
                while engine.events.totals[EventKind.RESTART] <= number:
                    await asyncio.sleep(0.001)
                during = await collect(engine.generate([9], sampling(max_tokens=3, seed=7), f"during-{number}"))
                assert during[-1].outputs[0].token_ids == oracle([9], 3, 7)
                assert await engine.call("get_weight_version")  # waits for the copy
                assert pids(engine)[number] != before
            for i, (first, task) in enumerate(zip(firsts, tasks, strict=True)):
                assert [*first.outputs[0].token_ids, *tokens_of(await task)] == oracle([5, i], lengths[i], i)
            await engine.check_health()
            assert not engine._client._owners and all(load.cost == 0 for load in engine._client._chooser.loads)

    run(main())


def test_prompts_with_a_common_beginning_meet_in_one_copy_and_find_its_cache() -> None:
    async def main() -> None:
        async with an_engine() as engine:
            beginnings = [[20 + i] * 256 for i in range(2)]
            for turn in range(3):
                for i, beginning in enumerate(beginnings):
                    prompt = [*beginning, *(30 + turn for _ in range(turn))]
                    await collect(engine.generate(prompt, sampling(max_tokens=2, seed=1), f"{turn}-{i}"))
            hits = [copy.counts["prefix_cache_hits"] for copy in engine.metrics.copies]
            assert min(hits) >= 2 * 252  # each beginning was computed once, by another copy

    run(main())


def test_a_synchronous_engine_has_copies_too() -> None:
    engine = LLMEngine.from_engine_config(copies_config())
    try:
        for i in range(6):
            engine.add_request(str(i), [5, i], sampling(max_tokens=20, seed=i))
        ends: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            ends |= {output.request_id: output for output in engine.step() if output.finished}
        assert {name: list(output.outputs[0].token_ids) for name, output in ends.items()} == {
            str(i): oracle([5, i], 20, i) for i in range(6)
        }
    finally:
        engine.shutdown()


def test_a_copy_that_cannot_start_ends_the_start_with_its_error() -> None:
    with pytest.raises(ConfigError, match="the second copy has no device"):
        AsyncLLM.from_engine_config(copies_config(executor=f"{__name__}:RefusingExecutor"))


@pytest.mark.parametrize("core", ["inproc"])
def test_copies_in_the_callers_process_are_refused(core: str) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=2 needs a core in a process"):
        AsyncLLM.from_engine_config(copies_config(), core=core)
    with pytest.raises(ConfigError, match="data_parallel_size=2 needs a core in a process"):
        LLMEngine.from_engine_config(copies_config(), enable_multiprocessing=False)


# --- the client alone, with copies that the test plays ---


class PlayedCopy(CoreClient):
    """Keeps what it is sent; the test says what it answers."""

    shares_memory = False

    def __init__(self, hear: OnMessage) -> None:
        self.hear, self.sent, self.is_shut_down = hear, [], False
        self.ready = messages.Ready(num_blocks=100, block_size=4, max_model_len=64, max_concurrency=6.0)

    def send(self, message: messages.FrontendMessage) -> None:
        self.sent.append(message)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def ids(self) -> list[str]:
        return [each.request_id for one in self.sent if isinstance(one, messages.AddRequests) for each in one.requests]


def played(count: int = 2) -> tuple[CopiesClient, list[PlayedCopy], list[Any]]:
    heard: list[Any] = []
    client = CopiesClient([PlayedCopy] * count, heard.append)
    return client, client.clients, heard  # type: ignore[return-value]


def add(client: CopiesClient, *names: str, prompt: Any = (1, 2, 3), **fields: Any) -> None:
    client.send(messages.AddRequests([EngineRequest(name, list(prompt), **fields) for name in names]))


def test_requests_alternate_among_copies_with_equal_loads_and_siblings_stay_together() -> None:
    client, (one, two), _ = played()
    add(client, "a", "b", "c", "d")
    assert (len(one.ids()), len(two.ids())) == (2, 2)
    add(client, "e", "f", "g", group_id="group")
    assert sorted(map(len, (set(one.ids()) & set("efg"), set(two.ids()) & set("efg")))) == [0, 3]


def test_a_request_can_name_its_copy_and_a_copy_that_does_not_exist_is_refused() -> None:
    client, (one, two), _ = played()
    add(client, "a", "b", "c", copy=1)
    assert (one.ids(), two.ids()) == ([], ["a", "b", "c"])

    async def main() -> None:
        async with an_engine() as engine:
            for number in range(3):
                await collect(engine.generate([5], sampling(max_tokens=4, seed=1), str(number), data_parallel_rank=1))
            assert [copy.counts["engine_steps"] > 0 for copy in engine.metrics.copies] == [False, True]
            with pytest.raises(RequestError, match="data_parallel_rank is 2; this engine has the copies 0 to 1"):
                await collect(engine.generate([5], sampling(max_tokens=4), "no", data_parallel_rank=2))

    run(main())


def test_a_long_prompt_that_waits_counts_more_than_many_that_are_answered() -> None:
    client, (one, two), _ = played()
    add(client, "long", prompt=range(5000))
    add(client, *(f"short {i}" for i in range(20)))
    assert sorted((len(one.ids()), len(two.ids()))) == [1, 20]
    busy = one if "long" in one.ids() else two
    busy.hear(messages.Outputs(EngineCoreOutputs(["long"], [1])))
    add(client, "next")
    assert "next" in busy.ids()


def test_an_ended_request_counts_no_more_and_an_abort_reaches_its_copy_alone() -> None:
    client, (one, two), heard = played()
    add(client, "a", "b")
    owner, other = (one, two) if "a" in one.ids() else (two, one)
    output = EngineCoreOutput("a", [1], finish_reason=FinishReason.LENGTH)
    owner.hear(messages.Outputs(EngineCoreOutputs(outputs=[output], stats=SchedulerStats())))
    assert heard[-1].outputs.engine == client.clients.index(owner)
    client.send(messages.AbortRequests(["a", "b", "unknown"]))
    assert other.sent[-1] == messages.AbortRequests(["b"]) and not isinstance(owner.sent[-1], messages.AbortRequests)
    assert all(load.cost == 0 for load in client._chooser.loads)


def test_calls_reach_all_copies_and_their_answers_become_one() -> None:
    client, copies, heard = played()
    cases = {
        "collective_rpc": ([[1], [2]], [1, 2]),
        "abort_named": ([1, 2], 3),
        "is_sleeping": ([False, True], True),
        "reset_prefix_cache": ([True, False], False),
        "pause_state": (["paused", "draining"], "draining"),
        "timeline": ([None, {"id": "a"}], {"id": "a"}),
        "get_weight_version": (["base", "base"], "base"),
    }
    for number, (name, (values, joined)) in enumerate(cases.items()):
        client.send(messages.UtilityCall(number, name))
        for copy, value in zip(reversed(copies), reversed(values), strict=True):
            copy.hear(messages.UtilityResult(number, value))
        assert heard[-1].get() == joined, name
    client.send(messages.UtilityCall(99, "resume"))
    copies[0].hear(messages.UtilityResult(99))
    copies[1].hear(messages.UtilityResult(99, error="no"))
    with pytest.raises(EngineError, match="no"):
        heard[-1].get()


def test_a_copy_that_died_gets_its_requests_again_and_calls_wait_for_it() -> None:
    client, (one, two), heard = played()
    add(client, "a", "b", "c", "d")
    client.send(messages.UtilityCall(1, "stats"))
    two.hear(messages.UtilityResult(1, 5))
    one.hear(messages.Restarting("killed"))
    assert [type(each) for each in heard] == [messages.Restarting, messages.UtilityResult]
    assert not heard[0].is_whole and "started again" in str(heard[1].error)
    one.hear(messages.UtilityResult(1, 5))  # too late
    add(client, "e", "f")
    assert {"e", "f"} <= set(two.ids())
    client.send(messages.UtilityCall(2, "stats"))
    assert not any(isinstance(each, messages.UtilityCall) and each.call_id == 2 for each in two.sent)
    before = one.ids()
    one.hear(messages.Restarted())
    assert isinstance(heard[-1], messages.Restarted) and sorted(heard[-1].core_ids or ()) == sorted(before)
    client.send(messages.AddRequests([EngineRequest(name, [1, 2, 3]) for name in before], again=True))
    assert one.ids() == [*before, *before] and one.sent[-1].again


def test_an_engine_all_of_whose_copies_are_started_again_is_not_healthy() -> None:
    _, (one, two), heard = played()
    one.hear(messages.Restarting("killed"))
    two.hear(messages.Restarting("killed"))
    assert isinstance(heard[-1], messages.Stalled) and heard[-1].message
    two.hear(messages.Restarted())
    assert heard[-2] == messages.Stalled("")


def test_queues_of_copies_are_one_queue_that_is_full_when_all_are() -> None:
    _, (one, two), heard = played()
    one.hear(messages.Outputs(EngineCoreOutputs(queue=QueueState(10, 5.0, [""]))))
    assert heard[-1].outputs.queue == QueueState(20, 0.0, [])
    two.hear(messages.Outputs(EngineCoreOutputs(queue=QueueState(30, 2.0, [""]))))
    assert heard[-1].outputs.queue == QueueState(40, 2.0, [""])


def test_a_start_that_fails_leaves_no_copy() -> None:
    started: list[PlayedCopy] = []

    def start(hear: OnMessage) -> CoreClient:
        started.append(PlayedCopy(hear))
        return started[-1]

    def fail(hear: OnMessage) -> CoreClient:
        raise EngineDeadError("no device")

    with pytest.raises(EngineDeadError, match="no device"):
        CopiesClient([start, fail, start], print)
    assert len(started) == 2 and all(copy.is_shut_down for copy in started)


def test_before_a_copy_is_ended_all_are_known_to_end() -> None:
    class Door:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    class Ending(PlayedCopy):
        def shutdown(self) -> None:
            seen.append((door.is_closed, gathering.is_closed))

    seen: list[tuple[bool, bool]] = []
    door, gathering = Door(), Gathering(lambda: "here", 2)
    CopiesClient([Ending] * 2, print, gathering, door).shutdown()  # type: ignore[arg-type]
    assert seen == [(True, True)] * 2
