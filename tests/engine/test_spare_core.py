"""A spare process becomes the next engine core; nothing depends on it, and nothing is left of it."""

import asyncio
import contextlib
import dataclasses
import os
import select
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import make_config
from tests.engine.test_async_llm import collect, oracle, sampling
from tests.engine.test_recovery import until_restarted

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.spare_core import WARM, SpareCores, wants_spare


def config_of(device: str = "cpu", **parallel: Any) -> EngineConfig:
    config = make_config(max_model_len=2000, num_blocks=9000, device=device)
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))


@contextlib.asynccontextmanager
async def an_engine() -> AsyncIterator[tuple[AsyncLLM, SpareCores]]:
    engine = AsyncLLM.from_engine_config(config_of(spare_core=True), core="process")
    try:
        yield engine, engine._client.source
    finally:
        engine.shutdown()


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def until_warm(spares: SpareCores) -> int:
    """The spare's process, when it has imported everything."""
    while (pid := spares.pid) is None or name_of(pid) != WARM:
        await asyncio.sleep(0.01)
    return pid


async def stream_over_death(engine: AsyncLLM, name: str) -> int:
    """Kill the core under a stream, which ends with the oracle's tokens; the next core's process."""
    stream = engine.generate([5, 1], sampling(max_tokens=900, seed=1), name)
    await anext(stream)
    pid = engine._client.client.pid
    os.kill(pid, signal.SIGKILL)
    await until_restarted(engine, pid)
    assert (await collect(stream))[-1].outputs[0].token_ids == oracle([5, 1], 900, 1)
    return engine._client.client.pid


def test_the_spare_becomes_the_core_and_another_one_takes_its_place() -> None:
    async def main() -> None:
        async with an_engine() as (engine, spares):
            first = await until_warm(spares)
            assert await stream_over_death(engine, "a") == first and name_of(first) == "quire core"
            second = await until_warm(spares)
            assert second != first
            os.kill(second, signal.SIGKILL)  # a spare that is gone is not missed
            assert await stream_over_death(engine, "b") not in (first, second)
            watch = os.pidfd_open(await until_warm(spares))
        assert select.select([watch], [], [], 20)[0], "the spare outlives its engine"
        os.close(watch)

    asyncio.run(main())


def test_a_spare_that_still_imports_becomes_a_core_too() -> None:
    async def main() -> None:
        async with an_engine() as (engine, spares):
            pid = spares.pid
            assert await stream_over_death(engine, "a") == pid

    asyncio.run(main())


def test_a_spare_imports_what_the_core_has_imported_but_nothing_foreign(capfd: pytest.CaptureFixture[str]) -> None:
    spares = SpareCores()
    spares.refill(["quire.core.scheduler", "quire.no_such_module", "antigravity"])
    asyncio.run(until_warm(spares))
    assert spares.pid is not None
    words = Path(f"/proc/{spares.pid}/cmdline").read_text()
    assert "quire.core.scheduler" in words and "antigravity" not in words
    spares.refill(["quire.core.scheduler"])  # there is one
    watch = os.pidfd_open(spares.pid)
    spares.close()
    assert select.select([watch], [], [], 20)[0] and spares.pid is None
    os.close(watch)
    spares.refill(["quire"])
    assert spares.pid is None and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("device", "size", "wanted", "has_one"),
    [
        ("cpu", 1, None, False),
        ("cuda", 1, None, True),
        ("cuda", 2, None, False),
        ("cpu", 1, True, True),
        ("cuda", 1, False, False),
    ],
)
def test_one_gpu_has_a_spare_unless_the_user_wants_another_thing(
    device: str, size: int, wanted: bool | None, has_one: bool
) -> None:
    assert wants_spare(config_of(device, spare_core=wanted, tensor_parallel_size=size)) is has_one
