"""Groups of processes that live as long as the tests: starting them and importing torch takes longer than most of their jobs."""

import atexit
import functools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """The processes of one group. They end with this process: their input does."""

    def __init__(self, size: int) -> None:
        command = [sys.executable, "-m", "tests.distributed.one_rank"]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), str(size)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(size)
        ]
        atexit.register(self.end)

    def run(self, folder: Path, models: dict[str, Path], kernels: str, experts: str) -> list[Any]:
        """What every rank wrote. After a failure the group is ended: others may still wait for the rank that failed."""
        paths = {name: str(path) for name, path in models.items()}
        job = json.dumps({"folder": str(folder), "models": paths, "kernels": kernels, "experts": experts})
        with ThreadPoolExecutor(len(self._processes)) as threads:
            for answer in as_completed([threads.submit(self._ask, process, job) for process in self._processes]):
                if failed := answer.result():
                    self.end()
                    raise AssertionError(failed)
        return [np.load(folder / f"rank{rank}.npz") for rank in range(len(self._processes))]

    @staticmethod
    def _ask(process: "subprocess.Popen[str]", job: str) -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(job + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        return json.loads(answer) if answer else f"a rank has ended; its code is {process.wait()}"

    def end(self) -> None:
        """End the processes."""
        ranks_of.cache_clear()
        for process in self._processes:
            process.kill()
            process.wait()


@functools.cache
def ranks_of(size: int) -> Ranks:
    """The group of so many ranks."""
    return Ranks(size)
