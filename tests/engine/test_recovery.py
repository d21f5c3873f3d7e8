"""A core that dies is started again, and every request ends with the tokens that it would have had."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.engine.builders import ENDLESS, ROOM, make_config
from tests.engine.test_async_llm import collect, oracle, sampling, tokens_of
from tests.oracles.hash_model import HashExecutor, HashModel

from quire.config import EngineConfig
from quire.config.speculative import SpeculativeConfig
from quire.core.output import SchedulerOutput
from quire.engine import recovery
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.core_client import CoreClient, InprocClient, OnMessage
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import AddRequests, Dead, Ready, Restarted, Standing
from quire.engine.recovery import RecoveringClient
from quire.engine.request_record import RequestRecord
from quire.errors import CapacityError, ConfigError, EngineDeadError, EngineError
from quire.metrics.events import EventKind
from quire.request import EngineRequest, SchedulerStats, token_array
from quire.sampling_params import RequestOutputKind, SamplingParams

POISON = 499


class FragileExecutor(HashExecutor):
    """Dies where a step begins a prompt that holds `POISON`."""

    def execute(self, step: SchedulerOutput) -> None:
        if any(POISON in request.token_ids[: request.num_prompt_tokens] for request in step.new_requests):
            os._exit(3)
        super().execute(step)


@contextlib.asynccontextmanager
async def an_engine(speculative: SpeculativeConfig | None = None, **settings: Any):
    config = dataclasses.replace(make_config(**ROOM, **settings), speculative=speculative)
    engine = AsyncLLM.from_engine_config(config, core="process")
    try:
        yield engine
    finally:
        engine.shutdown()


def kill(engine: AsyncLLM) -> None:
    os.kill(engine._client.client.pid, signal.SIGKILL)


async def until_restarted(engine: AsyncLLM, pid: int) -> None:
    while engine._client.client.pid == pid or engine._restarting:
        await asyncio.sleep(0.01)


async def until_each_has_more(records: list[RequestRecord]) -> None:
    """Until each request has got a token of the core that runs now: one that gets none is suspected of its death."""
    known = [(record, len(record.sequences[0].token_ids)) for record in records]
    while any(not record.is_finished and len(record.sequences[0].token_ids) <= before for record, before in known):
        await asyncio.sleep(0.001)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_killed_again_and_again_each_stream_ends_with_the_oracles_tokens(kind: RequestOutputKind) -> None:
    async def main() -> None:
        async with an_engine() as engine:
            lengths = [40 + 90 * i for i in range(12)]
            streams = [
                await engine.open_stream([5, i], sampling(max_tokens=length, seed=i, output_kind=kind), str(i))
                for i, length in enumerate(lengths)
            ]
            tasks = [asyncio.ensure_future(collect(stream.outputs())) for stream in streams]
            for _ in range(3):
                await until_each_has_more([stream.record for stream in streams])
                pid = engine._client.client.pid
                kill(engine)
                await until_restarted(engine, pid)
            results = await asyncio.gather(*tasks)
            for i, (outputs, length) in enumerate(zip(results, lengths, strict=True)):
                tokens = tokens_of(outputs) if kind is RequestOutputKind.DELTA else outputs[-1].outputs[0].token_ids
                assert list(tokens) == oracle([5, i], length, i)
            await engine.check_health()

    run(main())


def test_killed_with_guesses_in_flight_each_stream_ends_with_the_oracles_tokens() -> None:
    always = SpeculativeConfig(
        method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, enable_adaptive_verification=False
    )

    async def main() -> None:
        async with an_engine(always, vocab_size=8) as engine:  # so few tokens that some guesses are right
            few, lengths = HashModel(vocab_size=8), [300 + 90 * i for i in range(8)]
            streams = [
                await engine.open_stream([5, i], sampling(max_tokens=length, seed=i), str(i))
                for i, length in enumerate(lengths)
            ]
            tasks = [asyncio.ensure_future(collect(stream.outputs())) for stream in streams]
            for _ in range(3):
                await until_each_has_more([stream.record for stream in streams])
                pid = engine._client.client.pid
                kill(engine)
                await until_restarted(engine, pid)
            for i, (task, length) in enumerate(zip(tasks, lengths, strict=True)):
                assert list((await task)[-1].outputs[0].token_ids) == few.oracle(
                    [5, i], SamplingParams(max_tokens=length), i, 10_000
                )
            stats = msgspec.convert(await engine.call("stats"), SchedulerStats)
            assert 0 < sum(stats.accepted_per_position) < stats.num_draft_tokens

    run(main())


def test_a_core_that_dies_while_it_starts_is_followed_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = tmp_path / "now"
    monkeypatch.setenv("QUIRE_FAULTS", f"after-start@core:kill:1:{now}")

    async def main() -> None:
        async with an_engine() as engine:
            stream = engine.generate([5, 1], sampling(max_tokens=900, seed=1), "a")
            await anext(stream)
            pid = engine._client.client.pid
            now.touch()
            kill(engine)
            assert (await collect(stream))[-1].outputs[0].token_ids == oracle([5, 1], 900, 1)
            assert not now.exists() and engine._client.client.pid != pid

    run(main())


def test_a_core_that_dies_while_the_engine_drains_is_replaced_and_the_drain_ends() -> None:
    async def main() -> None:
        async with an_engine() as engine:
            streams = [engine.generate([5, i], sampling(max_tokens=900, seed=i), str(i)) for i in range(4)]
            for stream in streams:
                await anext(stream)
            tasks = [asyncio.ensure_future(collect(stream)) for stream in streams]
            draining = asyncio.ensure_future(engine.wait_for_requests_to_drain(60))
            await asyncio.sleep(0)
            kill(engine)
            await draining
            for i, task in enumerate(tasks):
                assert (await task)[-1].outputs[0].token_ids == oracle([5, i], 900, i)
            assert engine.events.totals[EventKind.RESTART] == 1

    run(main())


def test_what_comes_while_the_core_is_started_waits_for_it() -> None:
    async def main() -> None:
        async with an_engine() as engine:
            kill(engine)
            while not engine._restarting:
                engine._handle_inbox()
                await asyncio.sleep(0.001)
            with pytest.raises(EngineDeadError, match="started again"):
                await engine.check_health()
            outputs = await collect(engine.generate([5, 1], sampling(max_tokens=9, seed=1), "late"))
            assert outputs[-1].outputs[0].token_ids == oracle([5, 1], 9, 1)

    run(main())


def test_the_request_that_kills_cores_fails_alone() -> None:
    async def main() -> None:
        async with an_engine(executor="tests.engine.test_recovery:FragileExecutor") as engine:
            prompts = [[5, 1], [5, 2], [POISON], [5, 3]]
            tasks = [
                asyncio.ensure_future(collect(engine.generate(prompt, sampling(max_tokens=200, seed=i), str(i))))
                for i, prompt in enumerate(prompts)
            ]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for i, prompt in enumerate(prompts):
                if POISON in prompt:
                    assert isinstance(results[i], EngineError) and "request 2 was running alone" in str(results[i])
                else:
                    assert results[i][-1].outputs[0].token_ids == oracle(prompt, 200, i)
            totals = engine.metrics.events.totals  # which the console and `/metrics` show
            assert totals[EventKind.RESTART] == 3 and totals[EventKind.GIVEN_UP] == 1 and totals[EventKind.REPLAY] >= 4

    run(main())


def test_a_core_that_dies_too_often_stays_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_RESTARTS", 1)
    monkeypatch.setattr(recovery, "MAX_FRUITLESS_RESTARTS", 1)

    async def main() -> None:
        async with an_engine() as engine:
            task = asyncio.ensure_future(collect(engine.generate([5, 1], sampling(max_tokens=ENDLESS, seed=1), "a")))
            pid = engine._client.client.pid
            kill(engine)
            await until_restarted(engine, pid)
            kill(engine)
            with pytest.raises(EngineDeadError, match="started again 1 times"):
                await task
            assert engine.errored

    run(main())


def test_a_core_passes_over_requests_that_it_has_got_already() -> None:
    client = InprocClient(make_config())
    request = EngineRequest("a", [5, 1], sampling_params=sampling(max_tokens=3), seed=1)
    client.send(AddRequests([request]))
    client.send(AddRequests([request], again=True))
    tokens: list[int] = []
    while client.core.has_work():
        outputs = client.get_outputs()
        tokens += [*outputs.plain_tokens, *(token for one in outputs.outputs for token in one.new_token_ids)]
        assert not any(one.error for one in outputs.outputs)
    assert tokens == oracle([5, 1], 3, 1)


class CountingExecutor(HashExecutor):
    """Keeps what is prepared for requests of any kind."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.waits: list[bool] = []

    def prepare_to_serve(self, wait: bool = False) -> None:
        self.waits.append(wait)


@pytest.mark.parametrize("again", [False, True])
def test_requests_of_a_dead_core_do_not_wait_for_what_other_requests_need(again: bool) -> None:
    config = make_config()
    executor = CountingExecutor(config)
    EngineCore(config, executor, serves=True, is_awaited=again).shutdown()
    assert executor.waits == ([False] if again else [False, True])


def test_a_core_in_the_place_of_a_dead_one_is_told_so() -> None:
    told: list[tuple[Standing | None, Any]] = []
    restarted = threading.Event()

    def start(on_message: OnMessage, standing: Standing | None) -> CoreClient:
        told.append((standing, on_message))
        return cast("CoreClient", SimpleNamespace(ready=Ready(), shutdown=lambda: None))

    RecoveringClient(start, lambda message: restarted.set() if isinstance(message, Restarted) else None)
    told[0][1](Dead("killed"))
    assert restarted.wait(60)
    assert [standing for standing, _ in told] == [None, Standing()]


async def until_ready(engine: AsyncLLM, pid: int) -> None:
    """Until the core after `pid` serves."""
    await until_restarted(engine, pid)
    await engine.check_health()


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_new_core_is_paused_or_sleeps_as_the_old_one_was(level: int) -> None:
    async def main() -> None:
        async with an_engine() as engine:
            params = sampling(max_tokens=ENDLESS, seed=1, output_kind=RequestOutputKind.DELTA)
            stream = await engine.open_stream([5, 1], params, "a")
            tokens = list((await stream.next()).outputs[0].token_ids)
            await engine.sleep(level, mode="keep")
            pid = engine._client.client.pid
            kill(engine)
            await until_ready(engine, pid)
            assert await engine.is_sleeping()
            if level:
                with pytest.raises(CapacityError, match="sleeps"):
                    await collect(engine.generate([5, 2], sampling(max_tokens=3), "b"))
            assert await engine.wake_up()
            known = len(stream.record.sequences[0].token_ids)
            while len(tokens) <= known:
                tokens += (await stream.next()).outputs[0].token_ids
            stream.close()
            assert tokens == oracle([5, 1], len(tokens), 1)
            assert not await engine.is_sleeping()

    run(main())


@pytest.mark.exhaustive
def test_parts_that_were_woken_up_before_the_death_are_awake_after_it() -> None:
    async def main() -> None:
        async with an_engine() as engine:
            await engine.sleep(2)
            assert not await engine.wake_up(["weights"])
            pid = engine._client.client.pid
            kill(engine)
            await until_ready(engine, pid)
            assert await engine.is_sleeping() and await engine.wake_up(["kv_cache"])

    run(main())


def llm_engine(**settings: Any) -> LLMEngine:
    return LLMEngine(make_config(max_model_len=2000, num_blocks=9000, recovery=True, **settings))


def test_the_synchronous_engine_goes_on_with_a_new_core() -> None:
    engine = llm_engine()
    for i in range(8):
        engine.add_request(str(i), TokenizedPrompt(token_array([5, i])), sampling(max_tokens=100 + 50 * i, seed=i))
    outputs: dict[str, list[int]] = {str(i): [] for i in range(8)}
    num_steps = 0
    while engine.has_unfinished_requests():
        if num_steps in (5, 60):
            os.kill(engine._client.client.client.pid, signal.SIGKILL)
        num_steps += 1
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0].token_ids
    for i in range(8):
        assert outputs[str(i)] == oracle([5, i], 100 + 50 * i, i)
    assert engine.events.totals[EventKind.RESTART] == 2
    assert engine.explain()  # calls go on, too
    engine.shutdown()


def test_the_synchronous_engine_fails_the_request_that_kills_cores() -> None:
    engine = llm_engine(executor="tests.engine.test_recovery:FragileExecutor")
    for i, prompt in enumerate([[5, 1], [POISON], [5, 2]]):
        engine.add_request(str(i), TokenizedPrompt(token_array(prompt)), sampling(max_tokens=50, seed=i, n=2))
    last: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    assert "was running alone" in last["1"].error and last["1"].finished
    assert last["0"].outputs[0].finish_reason == last["2"].outputs[0].finish_reason == "length"
    engine.shutdown()


def test_a_call_waits_for_a_new_core() -> None:
    engine = llm_engine()
    pid = engine._client.client.client.pid
    os.kill(pid, signal.SIGKILL)
    while not engine.events.totals[EventKind.RESTART]:
        with contextlib.suppress(EngineError):  # of the call that the death ended
            engine.explain()
    assert engine.explain() and engine._client.client.client.pid != pid
    engine.shutdown()


def test_recovery_needs_a_process() -> None:
    with pytest.raises(ConfigError, match="process of its own"):
        LLMEngine(make_config(recovery=True), multiprocess=False)
    with pytest.raises(ConfigError, match="process of its own"):
        AsyncLLM(make_config(recovery=True), core="inproc")
