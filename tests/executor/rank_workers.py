"""Workers for tests of the executor with a process a rank: named by class path, made in the child."""

import concurrent.futures
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.oracles.async_platform import AsyncCpuPlatform

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.platforms.interface import Platform
from quire.sampling_params import SamplingParams
from quire.worker.worker import Worker


class TroubledWorker(Worker):
    """A worker with methods that go wrong on one rank."""

    def kill(self, rank: int) -> int:
        """End one rank as the kernel would."""
        if self.config.parallel.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.config.parallel.rank

    def exit(self, rank: int) -> None:
        """End one rank as an exception that nobody catches would, after the answer."""
        if self.config.parallel.rank == rank:
            self.execute = self._fail  # type: ignore[method-assign]

    def _fail(self, step: Any) -> Any:
        raise RuntimeError("the device caught fire")

    def refuse(self, rank: int) -> str:
        """An error on one rank."""
        if self.config.parallel.rank == rank:
            raise ValueError(f"rank {rank} does not want to")
        return "done"

    def refuse_while_others_wait(self) -> None:
        """An error on rank 1 while rank 0 does not come back."""
        if self.config.parallel.rank == 1:
            raise RuntimeError("out of luck")
        time.sleep(600)

    def keep_the_interpreter(self, file: str) -> None:
        """Wait in a library that does not let other threads run; the first rank makes a file before."""
        if not self.config.parallel.rank:
            Path(file).touch()
        ctypes.PyDLL(None).sleep(600)

    def echo(self, value: Any, *, twice: bool = False) -> Any:
        """What was sent."""
        return [value, value] if twice else value

    def answer_late(self, rank: int, file: str) -> int:
        """Answer on one rank only when a file is there."""
        while self.config.parallel.rank == rank and not os.path.exists(file):
            time.sleep(0.005)
        return rank

    def threads(self) -> int:
        """Compute threads of this rank."""
        return self.runtime.threads  # type: ignore[attr-defined]

    def torch_was_sent(self) -> Any:
        """Something that is not data."""
        return sys


class SlowFormsWorker(Worker):
    """Compiles no form on rank 1 until it is told to."""

    released = threading.Event()

    def prepare(self, params: SamplingParams) -> "concurrent.futures.Future[Any]":
        if self.config.parallel.rank == 0:
            return super().prepare(params)
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def compile_later() -> None:
            self.released.wait()
            done.set_result(super(SlowFormsWorker, self).prepare(params).result())

        threading.Thread(target=compile_later, daemon=True).start()
        return done

    def release(self) -> int:
        """From now on forms are compiled."""
        self.released.set()
        return self.config.parallel.rank


class RefusingWorker(Worker):
    """Refuses its configuration on rank 1, before the ranks have met."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        if config.parallel.rank == 1:
            raise ConfigError("rank 1 has no room for this dtype", setting="dtype")
        super().__init__(config, platform)


class AsyncWorker(Worker):
    """A device that works beside the host, made of the CPU."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        torch.set_num_threads(1)
        super().__init__(config, AsyncCpuPlatform())


class InterpretedWorker(Worker):
    """As `AsyncWorker`, with the GPU's kernels in Triton's interpreter."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        torch.set_num_threads(1)
        super().__init__(config, AsyncCpuPlatform("cuda"))


class SkippingWorker(Worker):
    """Leaves out one step on rank 1 when a file is there, which it removes."""

    def execute(self, step: Any) -> Any:
        """The other rank waits for this one in the first collective operation."""
        if self.config.parallel.rank == 1:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.environ["SKIP_A_STEP"])
                return SimpleNamespace(result=lambda: None)
        return super().execute(step)
