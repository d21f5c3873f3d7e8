"""NVIDIA GPUs as a platform: what they can do, what they refuse, and the device runtime.

Knows CUDA devices, streams and graphs. Knows nothing of models or of how a step is built. Importing it loads no torch:
the configuration asks it questions before anything is built, through NVIDIA's management library.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from quire.errors import ConfigError
from quire.extras import pip_install
from quire.logger import init_logger
from quire.platforms.host import usable_cpus
from quire.platforms.interface import (
    Capabilities,
    Explained,
    RecordedStep,
    VendorProfiler,
    WorkerProcess,
)
from quire.platforms.nvml import Gpu, visible_gpus
from quire.platforms.torch_gpu import TorchGpuPlatform, TorchGpuRuntime, TorchGraph
from quire.worker import startup

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.kernels.triton.runtime.preparation import KernelPreparation

logger = init_logger(__name__)

DTYPES = ("bfloat16", "float16", "float32")
MIN_CAPABILITY = (8, 0)
LARGE_MEMORY = 70 << 30
"""Bytes of device memory from which steps may be large by default."""


def why_unusable() -> str | None:
    """Why this machine cannot run the platform; None if it can. Loads no torch and creates no context."""
    version = importlib.metadata.version("torch")
    if version.endswith("+cpu"):
        return f"torch {version} was built without CUDA"
    gpus = visible_gpus()
    if not gpus:
        return "no NVIDIA GPU is visible"
    if gpus[0].capability < MIN_CAPABILITY:
        return f"{gpus[0].name} has compute capability {_dotted(gpus[0].capability)}; 8.0 or later is needed"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class CudaRuntime(TorchGpuRuntime):
    """One GPU, and the stream that the worker's thread submits to.

    Args:
        index: of the GPU, among those that CUDA counts.
    """

    def __init__(self, index: int = 0, kernels: KernelPreparation | None = None) -> None:
        import torch

        super().__init__("cuda", index)
        if kernels is not None:  # it answers what is asked about kernels
            self.rehearse, self.await_kernels = kernels.rehearse, kernels.await_steps
            self.is_compiled, self.hasten = kernels.is_compiled, kernels.hasten
            self.settled, self.started, self.close = kernels.finish, kernels.save, kernels.close
        torch.backends.cuda.matmul.allow_tf32 = False

    def profiler_activities(self) -> list[Any]:
        import torch

        return [torch.profiler.ProfilerActivity.CUDA]

    def vendor_profiler(self) -> VendorProfiler | None:
        """Nsight, told where to look by the CUDA profiler interface and NVTX ranges."""
        import torch

        profiler, ranges = torch.cuda.profiler, torch.cuda.nvtx
        where = {"push_range": ranges.range_push, "pop_range": ranges.range_pop}
        return cast(VendorProfiler, types.SimpleNamespace(start=profiler.start, stop=profiler.stop, **where))

    def capture(self, function: Callable[[], Any]) -> RecordedStep | None:
        import torch

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return TorchGraph(graph)


class CudaPlatform(TorchGpuPlatform):
    """NVIDIA GPUs from compute capability 8.0."""

    name, reads_peers = "cuda", True

    def __init__(self) -> None:
        self._kernels: KernelPreparation | None = None

    def _gpu(self) -> Gpu:
        gpus = visible_gpus()
        return gpus[0] if gpus else Gpu("no GPU", (0, 0), 0)

    def capabilities(self) -> Capabilities:
        gpu = self._gpu()
        capability = _dotted(gpu.capability)
        is_large = gpu.memory >= LARGE_MEMORY
        size = f"{gpu.name} has {gpu.memory >> 30} GiB"
        return Capabilities(
            dtypes=Explained(DTYPES, "bfloat16 and float16 run on the matrix units; float32 is exact and slow"),
            narrows=Explained(True, "float32 has no matrix units: --dtype float32 asks for it"),
            activation_dtype=Explained("model", "the matrix units take activations in the weights' type"),
            graphs=Explained("whole_step", "CUDA graphs"),
            async_output=Explained(True, "results are copied to the host while the next step runs"),
            fp8=Explained(gpu.capability >= (8, 9), f"compute capability {capability}; fp8 matrix units come with 8.9"),
            sleep=Explained(True, "pages and weights can be freed and made again"),
            page_alignment=Explained(16, "keys of 16 tokens fill the matrix units' shortest side"),
            max_num_batched_tokens=Explained((16384, 8192) if is_large else (8192, 2048), size),
            max_num_seqs=Explained((1024, 1024) if is_large else (256, 256), size),
            min_prefill_tokens=Explained(2048, "a step with prompts takes about as long with so many as with one"),
            swap=Explained(True, "pages are copied over the bus"),
            pinning=Explained(True, "CUDA maps pages of the host's memory"),
            tensor_parallel=Explained(True, "NCCL, between GPUs of this host"),
            expert_parallel=Explained(True, "each rank computes its own experts for all tokens"),
            token_exchange=Explained(True, "NCCL; steps run eagerly then"),
            pipeline_parallel=Explained(True, "NCCL, between GPUs of this host"),
        )

    def check_config(self, config: EngineConfig) -> EngineConfig:
        why = why_unusable()
        if why is not None:
            raise ConfigError(f"device='cuda' cannot be used: {why}; use --device cpu", setting="device")
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "the cuda platform needs Triton, which comes with PyTorch's CUDA builds: install it "
                f"({pip_install('triton')}), or use --device cpu",
                setting="device",
            )
        seen = f"{self._gpu().name}, {len(visible_gpus())} visible"
        return dataclasses.replace(config, provenance={**config.provenance, "device.gpu": seen})

    def begin_start(self, config: EngineConfig) -> None:
        from quire.kernels.triton.runtime.preparation import KernelPreparation

        major, minor = self._gpu().capability
        processes = max(1, (usable_cpus() - 2) // config.parallel.num_devices)
        self._kernels = KernelPreparation(config, 10 * major + minor, processes)
        self._kernels.begin()
        startup.begin(self.local_device(config))

    def memory_bytes(self) -> int | None:
        return self._gpu().memory

    def device_count(self) -> int | None:
        return len(visible_gpus())

    def device_name(self) -> str:
        return self._gpu().name

    def worker_process(self, config: EngineConfig, rank: int) -> WorkerProcess:
        # As gloo: the ranks of one host meet on its loopback device.
        nccl = {"NCCL_SOCKET_IFNAME": "lo", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        return WorkerProcess({**super().worker_process(config, rank).environment, **nccl})

    def runtime(self, config: EngineConfig) -> CudaRuntime:
        return CudaRuntime(self.local_device(config), self._kernels)

    def select_kernels(self, *, deterministic: bool = False) -> None:
        from quire.kernels import ops, triton

        if self._kernels is not None:
            self._kernels.install()
        triton.register()
        ops.select(self.name, deterministic=deterministic)

    def attention_backends(self) -> list[str]:
        libraries = ("flash:FlashBackend", "flashinfer:FlashInferBackend")
        return [
            f"quire.attention.{path}" for path in (*libraries, "triton:TritonBackend", "reference:ReferenceBackend")
        ]
