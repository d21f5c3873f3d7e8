"""AMD GPUs as a platform, through a ROCm build of torch, whose `torch.cuda` is HIP. Never run on the hardware.

Triton's kernels are those of the cuda platform, without what is NVIDIA's alone (`kernels/triton/nvidia_only.py`). They were
compiled for gfx942. Importing it loads no torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire.platforms.cuda import CudaRuntime
from quire.platforms.interface import Capabilities, Explained, WorkerProcess
from quire.platforms.sysfs_gpus import SysfsGpu, amd_gpus
from quire.platforms.untested import UntestedGpu, modest_capabilities, torch_build

if TYPE_CHECKING:
    from quire.config import EngineConfig

SUPPORTED = ("gfx90a", "gfx942", "gfx950")
"""Instruction sets with matrix units and a wave of 64, which Triton compiles for."""
ASSUMED = SysfsGpu("gfx942", 192 << 30)
"""The device that is described where there is none."""


class RocmRuntime(CudaRuntime):
    """One AMD GPU. torch's names are those of CUDA; kernels are launched by Triton itself."""

    def vendor_profiler(self) -> None:
        """ROCm's profiler is started from outside."""


class RocmPlatform(UntestedGpu):
    """AMD Instinct GPUs."""

    name, vendor = "rocm", "amd"

    def why_unusable(self) -> str | None:
        build = torch_build()
        if "rocm" not in build:
            return f"torch {build} was not built for ROCm"
        gpus = amd_gpus()
        if not gpus:
            return "no AMD GPU is visible"
        if gpus[0].name not in SUPPORTED:
            return f"{gpus[0].name} is none of {', '.join(SUPPORTED)}"
        return None

    def _gpu(self) -> SysfsGpu:
        return next(iter(amd_gpus()), ASSUMED)

    def capabilities(self) -> Capabilities:
        size = f"{self._gpu().name} has {self._gpu().memory >> 30} GiB"
        claimed = modest_capabilities(
            size, is_gpu=True, tensor_parallel=Explained(True, "RCCL, under torch's name for NCCL")
        )
        return dataclasses.replace(claimed, graphs=Explained("whole_step", "HIP graphs, by torch's CUDAGraph"))

    def memory_bytes(self) -> int | None:
        return self._gpu().memory or None

    def device_count(self) -> int | None:
        return len(amd_gpus())

    def device_name(self) -> str:
        return f"AMD {self._gpu().name}"

    def worker_process(self, config: EngineConfig, rank: int) -> WorkerProcess:
        return WorkerProcess({**super().worker_process(config, rank).environment, "NCCL_SOCKET_IFNAME": "lo"})

    def runtime(self, config: EngineConfig) -> RocmRuntime:
        return RocmRuntime(self.local_device(config))
