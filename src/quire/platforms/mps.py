"""Apple's GPUs as a platform, through torch.mps, on the plain PyTorch kernels. Never run on the hardware.

Slow by design: every operation is its reference. Importing it loads no torch.
"""

from __future__ import annotations

import platform as machine
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.platforms.host import usable_memory
from quire.platforms.interface import Capabilities, DeviceRuntime, Explained, RecordedStep
from quire.platforms.untested import UntestedPlatform, modest_capabilities

if TYPE_CHECKING:
    import torch

    from quire.config import EngineConfig


class MpsRuntime(DeviceRuntime):
    """The one GPU. Steps are computed when they are submitted: the worker waits for each."""

    def device(self) -> torch.device:
        import torch

        return torch.device("mps")

    def synchronize(self) -> None:
        import torch

        torch.mps.synchronize()

    def memory_info(self) -> tuple[int, int]:
        import torch

        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total

    def peak_memory(self) -> int:
        import torch

        return torch.mps.driver_allocated_memory()  # torch.mps tells no peak

    def record(self, function: Callable[[], Any], num_tokens: int, num_logits: int) -> RecordedStep | None:
        return None

    def release_unused(self) -> None:
        import torch

        torch.mps.empty_cache()


class MpsPlatform(UntestedPlatform):
    """The GPU of a Mac with Apple's own processor."""

    name = "mps"

    def why_unusable(self) -> str | None:
        if sys.platform != "darwin" or machine.machine() != "arm64":
            return f"this is {sys.platform} on {machine.machine()}, and no Mac with Apple's own processor"
        return None

    def capabilities(self) -> Capabilities:
        one = Explained(False, "there is one device")
        size = "one device that shares the host's memory"
        return modest_capabilities(size, is_gpu=False, tensor_parallel=one)

    def memory_bytes(self) -> int | None:
        return usable_memory()[1]

    def device_count(self) -> int | None:
        return 1

    def device_name(self) -> str:
        return f"Apple {machine.machine()}"

    def runtime(self, config: EngineConfig) -> MpsRuntime:
        return MpsRuntime()

    def select_kernels(self, *, deterministic: bool = False) -> None:
        from quire.kernels import ops

        ops.select(self.name, deterministic=deterministic)

    def attention_backends(self) -> list[str]:
        return ["quire.attention.reference:ReferenceBackend"]
