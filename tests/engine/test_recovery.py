"""A core that dies is started again, and every request ends with the tokens that it would have had."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.engine.builders import make_config
from tests.engine.test_async_llm import collect, oracle, sampling, tokens_of
from tests.oracles.hash_model import HashExecutor

from quire.config import EngineConfig
from quire.core.output import SchedulerOutput
from quire.engine import recovery
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.core_client import CoreClient, InprocClient, OnMessage
from quire.engine.messages import AddRequests, Dead, Ready, Restarted
from quire.engine.recovery import MAX_FRUITLESS, RecoveringClient, Replay
from quire.errors import EngineDeadError, EngineError
from quire.request import EngineRequest
from quire.sampling_params import RequestOutputKind

POISON = 499


class FragileExecutor(HashExecutor):
    """Dies where a step begins a prompt that holds `POISON`."""

    def execute(self, step: SchedulerOutput) -> None:
        if any(POISON in request.token_ids for request in step.new_requests):
            os._exit(3)
        super().execute(step)


@contextlib.asynccontextmanager
async def an_engine(**settings: Any):
    config = make_config(max_model_len=2000, num_blocks=9000, **settings)
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


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_killed_again_and_again_each_stream_ends_with_the_oracles_tokens(kind: RequestOutputKind) -> None:
    async def main() -> None:
        async with an_engine() as engine:
            lengths = [40 + 90 * i for i in range(12)]
            tasks = [
                asyncio.ensure_future(
                    collect(engine.generate([5, i], sampling(max_tokens=length, seed=i, output_kind=kind), str(i)))
                )
                for i, length in enumerate(lengths)
            ]
            for _ in range(3):
                await asyncio.sleep(0.05)
                pid = engine._client.client.pid
                kill(engine)
                await until_restarted(engine, pid)
            results = await asyncio.gather(*tasks)
            for i, (outputs, length) in enumerate(zip(results, lengths, strict=True)):
                tokens = tokens_of(outputs) if kind is RequestOutputKind.DELTA else outputs[-1].outputs[0].token_ids
                assert list(tokens) == oracle([5, i], length, i)
            await engine.check_health()

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

    run(main())


def test_a_core_that_dies_too_often_stays_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_RESTARTS", 1)

    async def main() -> None:
        async with an_engine() as engine:
            task = asyncio.ensure_future(collect(engine.generate([5, 1], sampling(max_tokens=1900, seed=1), "a")))
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
    told: list[tuple[bool, Any]] = []
    restarted = threading.Event()

    def start(on_message: OnMessage, again: bool) -> CoreClient:
        told.append((again, on_message))
        return cast("CoreClient", SimpleNamespace(ready=Ready(), shutdown=lambda: None))

    RecoveringClient(start, lambda message: restarted.set() if isinstance(message, Restarted) else None)
    told[0][1](Dead("killed"))
    assert restarted.wait(10)
    assert [again for again, _ in told] == [False, True]


def record(request_id: str, num_tokens: int = 0) -> Any:
    sequences = [SimpleNamespace(token_ids=[1] * num_tokens)]
    return SimpleNamespace(request_id=request_id, sequences=sequences, is_finished=False)


def test_requests_that_go_on_are_no_suspects_however_often_cores_die() -> None:
    replay, records = Replay(), [record("a"), record("b")]
    for number in range(20):
        assert replay.core_died(records) is None
        assert replay.next_records() == records and not replay.holds_others
        for one in records:
            one.sequences[0].token_ids = [1] * (number + 1)


def test_suspects_go_on_one_at_a_time_until_each_has_a_token() -> None:
    replay, records = Replay(), [record("a"), record("b"), record("c", num_tokens=4)]
    for _ in range(MAX_FRUITLESS):
        replay.core_died(records)
        records[2].sequences[0].token_ids.append(1)
    assert replay.next_records() == records[:1] and replay.holds_others
    assert replay.next_records() == []
    records[0].sequences[0].token_ids.append(1)
    assert replay.next_records() == records[1:2]
    assert replay.core_died(records) is records[1]
    assert replay.next_records() == [records[0], records[2]] and not replay.holds_others
