"""The CPU as a platform: what it can do, what it refuses, and its device runtime.

Knows cores, memory and which kernels to ask for. Knows nothing of models or of how a step is built.
Importing it loads no torch: the configuration asks it questions before anything is built.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.errors import ConfigError, Explained
from quire.logger import init_logger
from quire.platforms.host import usable_cpus, usable_memory
from quire.platforms.interface import Capabilities, DeviceRuntime, HostMemory, Platform, RecordedStep, SettingRule

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.distributed.communicator import Communicator

logger = init_logger(__name__)

DTYPES = ("bfloat16", "float16", "float32")
KV_CACHE_CAP_BYTES = 4 << 30
"""Pages take at most this much unless the user names a size: a host's memory is shared with everything else on it."""


def has_native_kernels() -> bool:
    """Whether the compiled CPU kernels were built. Looks at the file only: loading it would load torch."""
    from quire.kernels.cpu import build

    return Path(build.__file__).with_name(build.LIBRARY).exists()


def thread_count(config: EngineConfig) -> int:
    """Compute threads: the setting, or the environment's, or every core that this process may use."""
    cores = usable_cpus()
    wanted = config.device.cpu_threads or envs.QUIRE_CPU_THREADS or 0
    return min(wanted, cores) if wanted > 0 else cores


class CpuRuntime(HostMemory, DeviceRuntime):
    """The host's memory and cores as a device."""

    def __init__(self, config: EngineConfig) -> None:
        import torch

        from quire.kernels import cpu

        self._ranks = config.parallel.num_devices
        self.threads = max(1, thread_count(config) // self._ranks)
        cpu.set_num_threads(self.threads)
        # Two pools on the same cores wait for one another's spinning threads: sampling 32 rows took 5 to 50 times as long.
        torch.set_num_threads(1 if cpu.library_status()[0] else self.threads)

    def synchronize(self) -> None:
        """Every call on a CPU has ended when it returns."""

    def memory_info(self) -> tuple[int, int]:
        free, total = usable_memory()
        return free // self._ranks, total

    def peak_memory(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def kv_cache_cap(self) -> Explained[int] | None:
        return Explained(KV_CACHE_CAP_BYTES, "the host's memory is shared; kv_cache_memory_bytes sets another size")

    def record(self, function: Callable[[], Any], num_tokens: int, num_logits: int) -> RecordedStep | None:
        from quire.kernels.cpu.recording import record

        return record(function, num_tokens, num_logits, runs=False)


class CpuPlatform(Platform):
    """Any CPU that PyTorch runs on; fast where the package's C++ kernels were built."""

    name = "cpu"

    def capabilities(self) -> Capabilities:
        native = has_native_kernels()
        return Capabilities(
            dtypes=Explained(
                DTYPES, "bfloat16 halves what a decode step reads; all three are exact to their own rounding"
            ),
            activation_dtype=Explained(
                "float32", "activations are small beside weights, and float32 needs no conversion"
            ),
            graphs=Explained("whole_step", "compiled kernels can be recorded and replayed")
            if native
            else Explained("none", "the compiled kernels are not there; plain PyTorch cannot be recorded"),
            async_output=Explained(False, "a step has ended when its call returns"),
            fp8=Explained(False, "CPUs have no fp8 arithmetic"),
            sleep=Explained(True, "pages and weights are ordinary memory"),
            page_alignment=Explained(1, "any page size works"),
            max_num_batched_tokens=Explained((4096, 2048), "larger steps gain nothing once the cores are busy"),
            max_num_seqs=Explained((256, 128), "decode gains little from larger batches on few cores"),
            min_prefill_tokens=Explained(4, "each token takes its time"),
            swap=Explained(True, "host pages are copied within memory"),
            pinning=Explained(False, "the device's memory is the host's"),
            tensor_parallel=Explained(True, "gloo, between processes of this host"),
            expert_parallel=Explained(True, "each rank computes its own experts for all tokens"),
            token_exchange=Explained(True, "gloo, between processes of this host"),
            pipeline_parallel=Explained(True, "gloo, between processes of this host"),
            computes_on_host=Explained(True, "steps take the cores that everything else takes"),
        )

    def setting_rules(self) -> tuple[SettingRule, ...]:
        if has_native_kernels():
            return ()
        why = "the compiled kernels are not there, and plain PyTorch's products depend on the batch"
        return (SettingRule("deterministic", (False,), why),)

    def check_config(self, config: EngineConfig) -> EngineConfig:
        self._check_memory(config)
        return self._with_threads(config)

    def _check_memory(self, config: EngineConfig) -> None:
        free, total = usable_memory()
        for setting, asked in (
            ("kv_cache_memory_bytes", config.cache.kv_cache_memory_bytes or 0),
            ("swap_space", int(config.cache.swap_space * (1 << 30))),
        ):
            if asked > free:
                raise ConfigError(
                    f"{setting} asks for {asked / 2**30:.2f} GiB, but this process may use {free / 2**30:.2f} GiB more "
                    f"of the host's {total / 2**30:.2f} GiB",
                    setting=setting,
                )

    def _with_threads(self, config: EngineConfig) -> EngineConfig:
        asked = config.device.cpu_threads
        if asked < 0:
            raise ConfigError(f"cpu_threads={asked} must be 0 (all usable cores) or more", setting="cpu_threads")
        threads = thread_count(config)
        if asked > threads:
            logger.warning(
                "cpu_threads=%d is more than the %d cores of this process: using %d", asked, threads, threads
            )
        if asked == threads:
            why = "as asked"
        elif not asked and envs.QUIRE_CPU_THREADS:
            why = f"QUIRE_CPU_THREADS={envs.QUIRE_CPU_THREADS}"
        else:
            why = f"the {usable_cpus()} cores that this process may use"
        return dataclasses.replace(
            config,
            device=dataclasses.replace(config.device, cpu_threads=threads),
            provenance={**config.provenance, "device.cpu_threads": why},
        )

    def memory_bytes(self) -> int | None:
        return usable_memory()[1]

    def runtime(self, config: EngineConfig) -> CpuRuntime:
        return CpuRuntime(config)

    def select_kernels(self, *, deterministic: bool = False) -> None:
        from quire.kernels import cpu, ops

        cpu.register()
        ops.select(self.name, deterministic=deterministic)

    def communicator(self, config: EngineConfig) -> Communicator | None:
        parallel = config.parallel
        if parallel.tensor_parallel_size == 1:
            return None
        from quire.distributed.gloo import GlooGroup

        return GlooGroup(parallel.rank, parallel.tensor_parallel_size, parallel.rendezvous)

    def attention_backends(self) -> list[str]:
        return ["quire.attention.cpu:CpuBackend", "quire.attention.reference:ReferenceBackend"]
