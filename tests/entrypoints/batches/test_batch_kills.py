"""Real processes with the demo model, killed while they answer batches: the results are those of a run that nobody disturbed."""

import functools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from tests.oracles.server_process import ROOT, SERVE, ServerProcess

from quire.entrypoints.cli.main import main

SMALL = ("--kv-cache-memory-bytes", "64M", "--max-model-len", "2048", "--cpu-threads", "1")
RUN_BATCH = (sys.executable, "-m", "quire.entrypoints.cli.main", "run-batch", "--no-progress", *SMALL)
Answers = Callable[[int], list[tuple[str, str]]]
pytestmark = pytest.mark.timeout(280)


def write_input(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            body = {"prompt": f"What is {number} + 25?", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            line = {"custom_id": f"n{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def texts_of(lines: bytes) -> list[tuple[str, str]]:
    results = [json.loads(line) for line in lines.splitlines()]
    return [(each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in results]


def num_answered(database: Path) -> int:
    """What a store has on the disk, as another process sees it."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return connection.execute("SELECT sum(completed) FROM batches").fetchone()[0] or 0
    except sqlite3.OperationalError:  # it is being made
        return 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers to an input of some length."""

    @functools.cache
    def answers(count: int) -> list[tuple[str, str]]:
        folder = tmp_path_factory.mktemp("undisturbed")
        requests, output = write_input(folder / "in", count), folder / "out"
        assert main([*RUN_BATCH[3:], "-i", str(requests), "-o", str(output)]) == 0
        found = texts_of(output.read_bytes())
        assert [name for name, _ in found] == [f"n{number}" for number in range(count)]
        return found

    return answers


KILLED = """
import os, signal, sys
from quire.entrypoints.batches.store import BatchStore
from quire.entrypoints.cli.main import main

left, record = int(sys.argv.pop(1)), BatchStore.record

async def record_and_die(store, results):
    global left
    results = list(results)
    if left <= 0:  # with answers that nobody has written down
        os.kill(os.getpid(), signal.SIGKILL)
    await record(store, results)
    left -= len(results)

BatchStore.record = record_and_die
sys.exit(main())
"""
"""The command, killed when it has some more answers than so many."""


def kill_run_batch(folder: Path, count: int, kills: int, seed: int) -> list[tuple[str, str]]:
    """Kill the command when it has some more answers; give it again; what it writes in the end."""
    draw = random.Random(seed)
    requests, output, journal = write_input(folder / "in", count), folder / "out", folder / "out.batch/batches.sqlite"
    options = ["-i", str(requests), "-o", str(output), "--max-inflight", "4"]
    for _ in range(kills):
        before, more = num_answered(journal), draw.randrange(1, max(2, count // (2 * kills)))
        command = [sys.executable, "-c", KILLED, str(more), *RUN_BATCH[3:], *options]
        assert subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
        assert before + more <= num_answered(journal) < count and not output.exists()
    subprocess.run([*RUN_BATCH, *options], cwd=ROOT, check=True, stderr=subprocess.DEVNULL, timeout=200)
    assert sorted(os.listdir(folder)) == ["in", "out"]
    return texts_of(output.read_bytes())


def test_run_batch_that_is_killed_goes_on(undisturbed: Answers, tmp_path: Path) -> None:
    assert kill_run_batch(tmp_path, 40, 1, seed=1) == undisturbed(40)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 4))
def test_run_batch_that_is_killed_six_times_goes_on(seed: int, undisturbed: Answers, tmp_path: Path) -> None:
    assert kill_run_batch(tmp_path, 400, 6, seed) == undisturbed(400)


class Server(ServerProcess):
    """A server of the demo model that keeps batches."""

    def __init__(self, store: Path, *flags: str) -> None:
        super().__init__(*SERVE, "--port", "0", "--batch-store", str(store), "--max-num-seqs", "8", *SMALL, *flags)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")

    def end(self, number: signal.Signals | None = None, seconds: float = 60) -> tuple[int, str]:
        self.openai.close()
        return super().end(number, seconds)

    def begin(self, requests: Path) -> str:
        file = self.openai.files.create(file=requests, purpose="batch")
        batch = self.openai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        return batch.id

    def answers(self, batch_id: str) -> list[tuple[str, str]]:
        """The results, once they are all there."""
        while (batch := self.openai.batches.retrieve(batch_id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing")
            time.sleep(0.05)
        assert batch.output_file_id is not None and batch.error_file_id is None
        return texts_of(self.openai.files.content(batch.output_file_id).content)


def kill_server(folder: Path, count: int, kills: int, seed: int, *flags: str) -> list[tuple[str, str]]:
    """Kill the server as soon as it has some more answers; start it again; the results in the end."""
    draw = random.Random(seed)
    store = folder / "store"
    requests = write_input(folder / "in", count)
    batch_id = ""
    for _ in range(kills):
        server = Server(store, *flags)
        batch_id = batch_id or server.begin(requests)
        enough = num_answered(store / "batches.sqlite") + draw.randrange(1, max(2, count // (2 * kills)))
        while num_answered(store / "batches.sqlite") < enough:
            time.sleep(0.005)
        server.kill()
    server = Server(store, *flags)
    answers = server.answers(batch_id)
    code, output = server.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in output
    return answers


def test_a_server_that_is_killed_goes_on(undisturbed: Answers, tmp_path: Path) -> None:
    assert kill_server(tmp_path, 40, 1, seed=1) == undisturbed(40)


@pytest.mark.exhaustive
def test_a_server_that_is_killed_five_times_goes_on(undisturbed: Answers, tmp_path: Path) -> None:
    assert kill_server(tmp_path, 400, 5, seed=2) == undisturbed(400)


@pytest.mark.exhaustive
def test_another_frontend_takes_over(undisturbed: Answers, tmp_path: Path) -> None:
    server = Server(tmp_path / "store", "--api-server-count", "2")
    try:
        batch_id = server.begin(write_input(tmp_path / "in", 400))
        victims = [
            int(pid)
            for task in Path(f"/proc/{server.popen.pid}/task").iterdir()
            for pid in (task / "children").read_text().split()
            if "frontend_child" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        assert len(victims) == 2
        for victim in victims:
            enough = num_answered(tmp_path / "store/batches.sqlite") + 20
            while num_answered(tmp_path / "store/batches.sqlite") < enough:
                time.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
            server.line_with("It is replaced")
        while True:
            try:
                assert server.answers(batch_id) == undisturbed(400)
                break
            except (openai.APIConnectionError, httpx.TransportError):
                time.sleep(0.05)
    finally:
        server.kill()
