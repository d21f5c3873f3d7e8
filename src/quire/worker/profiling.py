"""Profiles of a worker's steps, on demand: a Chrome trace by torch's profiler, or marks for the device vendor's own.

Knows when steps begin and end; a step is named by its number, its tokens and its requests. Belongs to the thread that runs
the steps.
"""

import contextlib
import os
import time
from collections.abc import Generator

import torch

from quire.config.observability import ProfilerConfig
from quire.core.output import SchedulerOutput
from quire.errors import EngineError
from quire.logger import init_logger
from quire.platforms.interface import DeviceRuntime, VendorProfiler

logger = init_logger(__name__)


class StepProfiler:
    """One profile, from `start` to `stop`.

    Args:
        config: with the request's own numbers of steps.
        name: of the file, without its ending.

    Raises:
        EngineError: the device has no profiler of its own, and that one is asked for.
    """

    def __init__(self, config: ProfilerConfig, runtime: DeviceRuntime, name: str) -> None:
        self._config = config
        self._runtime = runtime
        self._path = os.path.join(config.dir, name + (".pt.trace.json.gz" if config.use_gzip else ".pt.trace.json"))
        self._num_steps = 0
        self._trace: torch.profiler.profile | None = None
        self._vendor: VendorProfiler | None = None
        self._is_over = False
        if config.profiler == "device":
            self._vendor = runtime.vendor_profiler()
            if self._vendor is None:
                raise EngineError("profiler_config's profiler is 'device', and this device has none: use 'torch'")
        else:
            os.makedirs(config.dir, exist_ok=True)
        if not config.delay_iterations:
            self._begin()

    @contextlib.contextmanager
    def step(self, step: SchedulerOutput) -> Generator[None, None, None]:
        """Around the execution of a step."""
        config, number = self._config, self._num_steps
        self._num_steps += 1
        if number == config.delay_iterations and number:
            self._begin()
        name = f"step {step.step_id}: {step.total_num_tokens} tokens, {len(step.rows)} requests"
        if self._vendor is not None:
            self._vendor.push_range(name)
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            if self._vendor is not None:
                self._vendor.pop_range()
        if config.max_iterations and self._num_steps >= config.delay_iterations + config.max_iterations:
            self._end()

    def stop(self) -> str | None:
        """End it; the trace's path, where one was written."""
        self._end()
        return self._path if self._trace is not None else None

    def _begin(self) -> None:
        if self._vendor is not None:
            self._vendor.start()
            return
        config = self._config
        self._trace = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, *self._runtime.profiler_activities()],
            record_shapes=config.record_shapes,
            profile_memory=config.with_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )
        self._trace.start()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._runtime.synchronize()
        if self._vendor is not None:
            if self._num_steps > self._config.delay_iterations or not self._config.delay_iterations:
                self._vendor.stop()
        elif self._trace is not None:
            began = time.monotonic()
            self._trace.stop()
            self._trace.export_chrome_trace(self._path)
            logger.info(
                "profile of %d steps written to %s in %.1f s", self._num_steps, self._path, time.monotonic() - began
            )
