"""Ranks that hang: the core waits for them for ever, which is noticed from outside; all of them are replaced."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_async_llm import collect
from tests.engine.test_watchdog import LEARNT, until_each_has
from tests.executor.test_multiproc_death import PATIENCE_S, wait_for_end
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.metrics.events import EventKind
from quire.sampling_params import SamplingParams

pytestmark = pytest.mark.exhaustive  # each starts six processes that import torch


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


@contextlib.asynccontextmanager
async def two_ranks(llama: Path, **settings: Any):
    args = EngineArgs(
        model=str(llama),
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=4 << 20,
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        async_scheduling=False,
        **settings,
    )
    engine = AsyncLLM(args.create_engine_config(), core="process")
    try:
        yield engine
    finally:
        engine.shutdown()


async def generate(engine: AsyncLLM, prompt: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=600, seed=prompt[0], ignore_eos=True, detokenize=False)
    outputs = await collect(engine.generate({"prompt_token_ids": prompt}, params, f"r{prompt[0]}"))
    return list(outputs[-1].outputs[0].token_ids)


async def pids_of(engine: AsyncLLM) -> list[int]:
    return [rank["pid"] for rank in (await engine.explain())["ranks"]]


async def hangs_once(engine: AsyncLLM, hang: Any) -> None:
    """Streams before, during and after a hang have the same tokens; no process of the first core is left."""
    prompts = [[7, 3], [8, 3, 4]]
    expected = await asyncio.gather(*(generate(engine, prompt) for prompt in prompts))
    pids = await pids_of(engine)
    streams = asyncio.gather(*(generate(engine, prompt) for prompt in prompts))
    await until_each_has(engine, LEARNT)
    hang(pids)
    assert await asyncio.wait_for(streams, 6 * PATIENCE_S) == expected
    assert engine.events.totals == {EventKind.HANG: 1, EventKind.RESTART: 1, EventKind.REPLAY: 2}
    assert all(wait_for_end(pid) for pid in pids)
    await engine.check_health()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_noticed_and_replaced(
    llama: Path, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "2")

    async def main() -> None:
        async with two_ranks(llama) as engine:
            await hangs_once(engine, lambda pids: os.kill(pids[rank], signal.SIGSTOP))

    asyncio.run(main())
    assert f"quire rank {rank} (process" in caplog.text and "is stopped (SIGSTOP)" in caplog.text
    assert "stacks of quire core (process" in caplog.text and f"stacks of quire rank {1 - rank} (process" in caplog.text


def test_a_rank_that_leaves_a_step_out_is_noticed(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "2")
    monkeypatch.setenv("SKIP_A_STEP", str(tmp_path / "skip"))

    async def main() -> None:
        async with two_ranks(llama, worker_cls="tests.executor.rank_workers:SkippingWorker") as engine:
            await hangs_once(engine, lambda pids: (tmp_path / "skip").touch())

    asyncio.run(main())
    assert "made no progress" in caplog.text
    assert "all_reduce" in capfd.readouterr().err
