"""Several frontends of one core process: a death is every frontend's, and the request that kills cores is found among all."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.engine.builders import make_config
from tests.engine.test_async_llm import collect, oracle, sampling
from tests.engine.test_recovery import POISON

from quire.engine.async_llm import AsyncLLM
from quire.engine.process_client import open_client
from quire.engine.recovery import RecoveringClient
from quire.engine.router import FrontendRouter, FrontendSlot
from quire.errors import EngineError
from quire.metrics.events import EventKind

FRAGILE = "tests.engine.test_recovery:FragileExecutor"


@contextlib.asynccontextmanager
async def frontends(
    folder: Path, count: int, **settings: Any
) -> AsyncIterator[tuple[RecoveringClient, list[AsyncLLM]]]:
    """The core's client, and frontends of it behind a real router."""
    config = make_config(max_model_len=2000, num_blocks=9000, **settings)
    life_fd, end_fd = os.pipe()
    router = FrontendRouter(folder, count, lambda number: None)
    client = await asyncio.to_thread(open_client, config, "process", router.on_message)
    assert isinstance(client, RecoveringClient)
    router.attach(client)
    engines = [AsyncLLM(config, core=FrontendSlot(str(folder), number, life_fd)) for number in range(count)]
    try:
        yield client, engines
    finally:
        for engine in engines:
            engine.shutdown()
        client.shutdown()
        router.close()
        os.close(end_fd)
        os.close(life_fd)


def test_the_request_that_kills_cores_fails_alone_whichever_frontend_it_comes_from(tmp_path: Path) -> None:
    async def main() -> None:
        async with frontends(tmp_path, 2, executor=FRAGILE) as (_, engines):
            prompts = [[5, number] for number in range(8)]
            prompts[3] = [POISON]
            tasks = [
                asyncio.ensure_future(
                    collect(engines[number % 2].generate(prompt, sampling(max_tokens=200, seed=number), str(number)))
                )
                for number, prompt in enumerate(prompts)
            ]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
                if POISON in prompt:
                    assert isinstance(result, EngineError) and "request 3 was running alone" in str(result)
                else:
                    assert not isinstance(result, BaseException), result
                    assert result[-1].outputs[0].token_ids == oracle(prompt, 200, number)
            totals = [engine.events.totals for engine in engines]
            assert [each[EventKind.RESTART] for each in totals] == [3, 3]
            assert [each[EventKind.GIVEN_UP] for each in totals] == [0, 1]

    asyncio.run(main())


def test_streams_of_all_frontends_go_on_behind_the_death_of_the_core(tmp_path: Path) -> None:
    async def main() -> None:
        async with frontends(tmp_path, 3) as (client, engines):
            lengths = [300 + 100 * number for number in range(9)]
            streams = [
                engines[number % 3].generate([5, number], sampling(max_tokens=length, seed=number), str(number))
                for number, length in enumerate(lengths)
            ]
            for stream in streams:
                await anext(stream)
            os.kill(client.client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            results = await asyncio.gather(*map(collect, streams))
            for number, (result, length) in enumerate(zip(results, lengths, strict=True)):
                assert result[-1].outputs[0].token_ids == oracle([5, number], length, number)
            assert all(engine.events.totals[EventKind.RESTART] == 1 for engine in engines)

    asyncio.run(main())
