"""Ends that nobody asked for: of a rank, of the parent, at the start. All with real processes and real signals."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.engine.arg_utils import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.errors import ConfigError, EngineDeadError, EngineError
from quire.executor.multiproc import MultiprocExecutor

WORKERS = "tests.executor.rank_workers"
PATIENCE_S = 60.0
LONG = pytest.mark.exhaustive
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(llama: Path) -> Any:
    engine = TinyEngine(llama, tensor_parallel_size=2, worker_cls=f"{WORKERS}:TroubledWorker")
    yield engine
    engine.executor.shutdown()


def executor_of(engine: TinyEngine) -> MultiprocExecutor:
    assert isinstance(engine.executor, MultiprocExecutor)
    return engine.executor


def wait_for_end(pid: int) -> bool:
    """Whether a process, which need not be this one's child, ends within our patience."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([watch], [], [], PATIENCE_S)
    os.close(watch)
    return bool(ready)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_killed_rank_is_named_and_the_others_end_with_it(engine: TinyEngine, rank: int) -> None:
    executor = executor_of(engine)
    pids = executor.pids
    with pytest.raises(EngineError, match=rf"rank {rank} \(process {pids[rank]}\) was killed by SIGKILL"):
        executor.collective_rpc("kill", (rank,))
    assert all(wait_for_end(pid) for pid in pids)
    with pytest.raises(EngineError, match="was killed by SIGKILL"):
        engine.generate([make_request("r", [1, 2, 3])])


def test_a_rank_that_is_killed_while_steps_run_is_named(engine: TinyEngine) -> None:
    executor = executor_of(engine)
    killer = threading.Timer(0.3, os.kill, (executor.pids[1], signal.SIGKILL))
    killer.start()
    with pytest.raises(EngineError, match=r"rank 1 .* was killed by SIGKILL"):
        for number in range(10_000):
            engine.generate([make_request(f"r{number}", [1, 2, 3], max_tokens=100)])


@pytest.mark.exhaustive  # by default a whole engine is told of it, below
def test_a_rank_that_is_killed_while_nothing_runs_is_told_of(engine: TinyEngine) -> None:
    executor = executor_of(engine)
    told = threading.Event()
    executor.on_failure = told.set
    os.kill(executor.pids[0], signal.SIGKILL)
    assert told.wait(PATIENCE_S)
    with pytest.raises(EngineError, match=r"rank 0 .* was killed by SIGKILL"):
        executor.idle()


def test_a_step_that_fails_on_one_rank_tells_its_last_words(engine: TinyEngine) -> None:
    executor = executor_of(engine)
    executor.collective_rpc("exit", (1,))
    with pytest.raises(EngineError, match=r"rank 1 .* ended with code 1: RuntimeError: the device caught fire"):
        engine.generate([make_request("r", [1, 2, 3])])


@pytest.mark.exhaustive  # five seconds of patience
def test_ranks_that_wait_for_one_that_has_an_error_are_ended(engine: TinyEngine) -> None:
    executor = executor_of(engine)
    pids = executor.pids
    with pytest.raises(EngineError, match="rank 1, while the others waited for it: RuntimeError: out of luck"):
        executor.collective_rpc("refuse_while_others_wait")
    assert all(wait_for_end(pid) for pid in pids)


@pytest.mark.parametrize(
    ("settings", "setting", "message"),
    [
        ({"worker_cls": f"{WORKERS}:RefusingWorker"}, "dtype", "rank 1 has no room"),
        pytest.param({"worker_cls": f"{WORKERS}:NoSuchWorker"}, "worker_cls", "cannot be imported", marks=LONG),
        pytest.param({"tensor_parallel_size": 3}, "tensor_parallel_size", "=3 does not fit heads: 4", marks=LONG),
    ],
)
def test_a_rank_that_refuses_the_configuration_says_so_with_the_setting(
    llama: Path, settings: dict[str, Any], setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        TinyEngine(llama, **({"tensor_parallel_size": 2} | settings))
    assert caught.value.setting == setting


PARENT = """
import os, sys, time
from pathlib import Path
from tests.worker.tiny_engine import TinyEngine, make_request
engine = TinyEngine(Path(sys.argv[1]), tensor_parallel_size=2, worker_cls="tests.executor.rank_workers:TroubledWorker")
engine.generate([make_request("first", [1, 2, 3], max_tokens=4)])
print(*engine.executor.pids, flush=True)
if sys.argv[2] == "drop":
    engine.executor.itself = engine
    del engine
    import gc
    gc.collect()
    time.sleep(600)
if sys.argv[2] == "kill in a library":
    engine.executor.collective_rpc("keep_the_interpreter", (sys.argv[3],))
for number in range(10**6):
    engine.generate([make_request(f"r{number}", [1, 2, 3], max_tokens=100)])
"""


def start_parent(llama: Path, *how: str) -> tuple["subprocess.Popen[str]", list[int]]:
    """A process with an engine of two ranks that works for ever, and the ranks' process ids."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(llama), *how], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    lines = (line for line in parent.stdout if not line.startswith(("INFO", "(")))
    return parent, [int(pid) for pid in next(lines).split()]


@pytest.mark.parametrize(
    "how",
    [
        "kill in a library",
        "kill when stopped",
        *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("kill", "drop")),
    ],
)
def test_no_rank_outlives_its_parent_or_a_dropped_executor(llama: Path, how: str, tmp_path: Path) -> None:
    entered = tmp_path / "entered"
    parent, pids = start_parent(llama, how, str(entered))
    try:
        if how == "kill when stopped":
            os.kill(pids[1], signal.SIGSTOP)
        if how == "kill in a library":
            while not entered.exists():
                assert parent.poll() is None
                time.sleep(0.01)
        if how != "drop":
            parent.kill()
        assert [wait_for_end(pid) for pid in pids] == [True, True]
    finally:
        parent.kill()
        parent.wait()


def test_interrupts_are_the_parents(engine: TinyEngine) -> None:
    executor = executor_of(engine)
    for pid in executor.pids:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
    assert executor.collective_rpc("echo", (1,)) == [1, 1]


@pytest.mark.parametrize("core", ["process", pytest.param("inproc", marks=pytest.mark.exhaustive)])
def test_an_idle_engine_dies_of_a_rank_that_is_killed(llama: Path, core: str) -> None:
    args = EngineArgs(
        model=str(llama), dtype="float32", max_model_len=64, kv_cache_memory_bytes=4 << 20, tensor_parallel_size=2,
        skip_tokenizer_init=True, recovery=False,
    )  # fmt: skip

    async def kill_and_wait() -> None:
        llm = AsyncLLM(args.create_engine_config(), core=core)
        ranks = (await llm.explain())["ranks"]
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not llm.errored and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            with pytest.raises(EngineDeadError, match=r"rank 1 .* was killed by SIGKILL"):
                await llm.check_health()
        finally:
            llm.shutdown()

    asyncio.run(kill_and_wait())
