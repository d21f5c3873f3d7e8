"""What the platforms have in common that were written without their hardware (ROCm, XPU, MPS): they have never run on it.

They are used only if they are named. Knows no device.
"""

from __future__ import annotations

import abc
import importlib.metadata
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.logger import init_logger
from quire.platforms.interface import Capabilities, Explained, Platform
from quire.platforms.torch_gpu import TorchGpuPlatform

if TYPE_CHECKING:
    from quire.config import EngineConfig

logger = init_logger(__name__)

DTYPES = ("bfloat16", "float16", "float32")
WARNING = (
    "The platform %s has never run on its hardware: compare its output (quire conformance --platform %s), and tell us"
)


class UntestedPlatform(Platform):
    """A platform that was checked without its device: against made-up facts, and by compiling its kernels."""

    @abc.abstractmethod
    def why_unusable(self) -> str | None:
        """Why this machine cannot run the platform; None if it can. Loads no torch."""

    def check_config(self, config: EngineConfig) -> EngineConfig:
        why = self.why_unusable()
        if why is not None:
            raise ConfigError(f"device={self.name!r} cannot be used: {why}; use --device cpu", setting="device")
        logger.warning_once(WARNING, self.name, self.name)
        return config


class UntestedGpu(TorchGpuPlatform, UntestedPlatform):
    """One that takes the cuda platform's Triton kernels, but for what is NVIDIA's alone (`kernels/triton/nvidia_only.py`).

    Attributes:
        vendor: Triton's word for who made it.
    """

    vendor: str

    def select_kernels(self, *, deterministic: bool = False) -> None:
        from quire.kernels import ops, triton
        from quire.kernels.triton.launch import set_vendor

        set_vendor(self.vendor)
        triton.register()
        ops.select(self.name, deterministic=deterministic, shares=("cuda",))

    def attention_backends(self) -> list[str]:
        return ["quire.attention.triton:TritonBackend", "quire.attention.reference:ReferenceBackend"]


def torch_build() -> str:
    """The installed torch's version, whose end names what it was built for: `+rocm6.4`, `+xpu`, `+cpu`, `+cu130`."""
    return importlib.metadata.version("torch")


def modest_capabilities(size: str, *, is_gpu: bool, tensor_parallel: Explained[bool]) -> Capabilities:
    """What such a platform claims: nothing whose kernels were not at least compiled for it.

    Args:
        size: the device and its memory, as the reason of defaults.
        is_gpu: Triton's kernels serve it, and it works beside the host.
    """
    unknown = "never run on the hardware: not claimed"
    return Capabilities(
        dtypes=Explained(DTYPES, "what torch computes with on this device"),
        activation_dtype=Explained("model", "as on other GPUs"),
        graphs=Explained("none", unknown),
        async_output=Explained(
            is_gpu, "results are copied to the host while the next step runs" if is_gpu else unknown
        ),
        fp8=Explained(False, "the kernels are written in NVIDIA's assembly, and AMD's older float8 is another format"),
        sleep=Explained(False, unknown),
        page_alignment=Explained(
            16 if is_gpu else 1, "the Triton kernels take pages of at least 16 tokens" if is_gpu else "any"
        ),
        max_num_batched_tokens=Explained((8192, 2048), size),
        max_num_seqs=Explained((256, 256), size),
        min_prefill_tokens=Explained(512, "a guess"),
        swap=Explained(is_gpu, "pages are copied over the bus" if is_gpu else unknown),
        pinning=Explained(is_gpu, "torch pins memory of the host for it" if is_gpu else "the memory is the host's"),
        tensor_parallel=tensor_parallel,
        expert_parallel=tensor_parallel,
    )
