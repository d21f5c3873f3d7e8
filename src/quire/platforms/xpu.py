"""Intel GPUs as a platform, through torch.xpu. Never run on the hardware.

Triton's kernels are those of the cuda platform, without what is NVIDIA's alone (`kernels/triton/nvidia_only.py`); Intel's Triton
compiles them. Importing it loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.platforms.interface import Capabilities, Explained
from quire.platforms.sysfs_gpus import SysfsGpu, intel_gpus
from quire.platforms.torch_gpu import TorchGpuRuntime
from quire.platforms.untested import UntestedGpu, modest_capabilities, torch_build

if TYPE_CHECKING:
    from quire.config import EngineConfig

ASSUMED = SysfsGpu("Intel GPU")
"""The device that is described where there is none."""


class XpuRuntime(TorchGpuRuntime):
    """One Intel GPU. Steps are submitted kernel by kernel: nothing is captured."""

    def __init__(self, index: int = 0) -> None:
        super().__init__("xpu", index)

    def profiler_activities(self) -> list[Any]:
        import torch

        return [torch.profiler.ProfilerActivity.XPU]


class XpuPlatform(UntestedGpu):
    """Intel's data center and Arc GPUs; one device."""

    name, vendor = "xpu", "intel"

    def why_unusable(self) -> str | None:
        build = torch_build()
        if not build.endswith("+xpu"):
            return f"torch {build} was not built for Intel's GPUs"
        return None if intel_gpus() else "no Intel GPU is visible"

    def capabilities(self) -> Capabilities:
        one = Explained(False, "no communicator yet: one device")
        return modest_capabilities(self.device_name(), is_gpu=True, tensor_parallel=one)

    def device_count(self) -> int | None:
        return len(intel_gpus())

    def device_name(self) -> str:
        return next(iter(intel_gpus()), ASSUMED).name

    def runtime(self, config: EngineConfig) -> XpuRuntime:
        return XpuRuntime(self.local_device(config))
