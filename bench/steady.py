"""A device with a clock and no arithmetic: every step takes its time, and its tokens tell which step they came from.

Stands behind a server when the server is what is measured: the end of each step is written into a shared file, so that
whoever reads a token knows how long it was on its way. Knows nothing of text but that tokens `FIRST_TOKEN` and after are
numbered. Configured through the model's config: `step_ms`, `prefill_token_us`, `clock_file`.
"""

import time
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.executor.interface import Executor

FIRST_TOKEN = 256
NUM_MARKS = 4096
"""Steps after which the numbers repeat."""


def open_clock(path: str, create: bool = False) -> npt.NDArray[np.float64]:
    """The shared file: when the step with each number ended, in seconds of `time.monotonic()`. [NUM_MARKS]"""
    return np.memmap(path, dtype=np.float64, mode="w+" if create else "r+", shape=(NUM_MARKS,))


class SteadyExecutor(Executor):
    """Gives every row of step `i` the token `FIRST_TOKEN + i % NUM_MARKS`, `step_ms` after the step began.

    A step begins when it was handed over and the one before it has ended.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        hf_config = config.model.hf_config.to_dict()
        self._step_s = float(hf_config.get("step_ms", 0.0)) / 1e3
        self._prefill_token_s = float(hf_config.get("prefill_token_us", 0.0)) / 1e6
        path = hf_config.get("clock_file")
        self._clock = open_clock(path) if path else np.zeros(NUM_MARKS)
        self._in_flight: deque[tuple[SchedulerOutput, float]] = deque()
        self._free_at = 0.0

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One layer that needs hardly any room."""
        return [KVCacheSpec(kind=KVKind.FULL, block_size=self.config.cache.block_size, bytes_per_token=1)]

    def available_kv_bytes(self) -> int:
        return 1 << 30

    def initialize(self, kv_cache: KVCacheConfig) -> None:
        """There is no cache."""

    def execute(self, step: SchedulerOutput) -> None:
        """Accept a step."""
        prefill_tokens = step.total_num_tokens - len(step.rows)
        takes = self._step_s + self._prefill_token_s * prefill_tokens
        self._free_at = max(self._free_at, time.monotonic()) + takes
        self._in_flight.append((step, self._free_at))

    def collect(self) -> ModelRunnerOutput:
        """Wait until the oldest step's time is over."""
        step, ends_at = self._in_flight.popleft()
        while (left := ends_at - time.monotonic()) > 0:
            time.sleep(left)
        number = step.step_id % NUM_MARKS
        rows = step.rows[step.needs_sample]
        token_ids = np.full(len(rows), FIRST_TOKEN + number, np.int32)
        self._clock[number] = time.monotonic()
        return ModelRunnerOutput(step.step_id, rows, token_ids, step_ms=self._step_s * 1e3)

    def sleep(self, level: int = 1) -> None:
        """There is nothing to give back."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nor to take."""

    def explain(self) -> dict[str, Any]:
        """What this stands on."""
        return {"model": "a device with a clock", "step_ms": self._step_s * 1e3}
