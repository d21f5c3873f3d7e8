"""A device that works beside the host, made of the CPU: what a GPU's runner does can be tested without one.

Steps run when they are submitted; events are always reached; a captured graph is the function itself, run again at the
sizes that it was captured with. So padding, packing, rows and in-flight tokens are real, and only time is not.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.oracles.interpreter import repair_interpreter

from quire.config import EngineConfig
from quire.kernels import ops
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Capabilities, DeviceEvent, DeviceRuntime, Explained, HostMemory, RecordedStep


class InstantEvent(DeviceEvent):
    is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def wait(self) -> None:
        pass

    def milliseconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, InstantEvent) and earlier.is_recorded and self.is_recorded  # as CUDA has it
        return 1.0


class FunctionGraph(RecordedStep):
    def __init__(self, function: Callable[[], Any], counts: dict[str, int]) -> None:
        self._function, self._counts = function, counts

    def replay(self, num_tokens: int, num_logits: int) -> None:
        self._counts["replayed"] += 1
        self._function()


class AsyncCpuRuntime(HostMemory, DeviceRuntime):
    """Counts what is captured and replayed."""

    def __init__(self) -> None:
        self.counts = {"captured": 0, "replayed": 0}

    def synchronize(self) -> None:
        pass

    def memory_info(self) -> tuple[int, int]:
        return 8 << 30, 16 << 30

    def peak_memory(self) -> int:
        return 0

    def record(self, function: Callable[[], Any], num_tokens: int, num_logits: int) -> RecordedStep | None:
        return None

    def event(self) -> DeviceEvent:
        return InstantEvent()

    def capture(self, function: Callable[[], Any]) -> RecordedStep | None:
        self.counts["captured"] += 1
        return FunctionGraph(function, self.counts)


class AsyncCpuPlatform(CpuPlatform):
    """Args: `kernels`: "reference", or "cuda" for the Triton kernels in the interpreter."""

    def __init__(self, kernels: str = "reference") -> None:
        self.kernels = kernels
        self.last_runtime: AsyncCpuRuntime | None = None

    def capabilities(self) -> Capabilities:
        return dataclasses.replace(
            super().capabilities(),
            activation_dtype=Explained("model", "as a GPU"),
            async_output=Explained(True, "as a GPU"),
            fp8=Explained(True, "as a GPU"),
        )

    def runtime(self, config: EngineConfig) -> Any:
        self.last_runtime = AsyncCpuRuntime()
        return self.last_runtime

    def select_kernels(self, *, deterministic: bool = False) -> None:
        if self.kernels == "cuda":
            from quire.kernels import triton

            repair_interpreter()
            triton.register()
        ops.select(self.kernels, deterministic=deterministic)

    def attention_backends(self) -> list[str]:
        triton = ["quire.attention.triton:TritonBackend"] if self.kernels == "cuda" else []
        return [*triton, "quire.attention.reference:ReferenceBackend"]

    def runner_class(self) -> str:
        return "quire.worker.device_runner:DeviceRunner"
