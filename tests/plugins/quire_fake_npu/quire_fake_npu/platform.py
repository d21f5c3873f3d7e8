"""The platform: what the device can do, what it refuses, and where its parts are.

Importing it loads no torch: the configuration asks it questions before anything is built.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quire.errors import Explained
from quire.platforms.interface import Capabilities, Platform, SettingRule
from quire_fake_npu.driver import MAX_DEVICES, TOTAL_BYTES

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.distributed.communicator import Communicator
    from quire_fake_npu.runtime import NpuRuntime, NpuUploads

DTYPES = ("float32", "bfloat16", "float16")
MODE = "QUIRE_FAKE_NPU_MODE"
"""A variable of the plugin's own: `async` (two steps in flight) or `sync` (a step ends before the next is planned)."""


class NpuPlatform(Platform):
    """The made-up device."""

    name = "npu"

    @property
    def is_async(self) -> bool:
        """Whether steps are planned before the last one has ended."""
        return os.environ.get(MODE, "async") == "async"

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=Explained(DTYPES, "what the host's cores compute with"),
            activation_dtype=Explained("model", "no unit wants another type"),
            graphs=Explained("none", "plain PyTorch's attention reads lengths on the host, which cannot be captured"),
            async_output=Explained(True, "copies to the host arrive when an event is waited for")
            if self.is_async
            else Explained(False, f"{MODE}=sync"),
            fp8=Explained(False, "the device has no float8 arithmetic"),
            sleep=Explained(True, "pages and weights can be freed and made again"),
            page_alignment=Explained(1, "any page size works"),
            max_num_batched_tokens=Explained((2048, 1024), "larger steps gain nothing"),
            max_num_seqs=Explained((64, 64), "larger batches gain nothing"),
            min_prefill_tokens=Explained(16, "each token takes its time"),
            swap=Explained(True, "pages are copied to the host"),
            tensor_parallel=Explained(True, "gloo, by way of the host"),
            expert_parallel=Explained(True, "each rank computes its own experts for all tokens"),
            token_exchange=Explained(True, "gloo, by way of the host"),
            pipeline_parallel=Explained(True, "gloo, by way of the host"),
        )

    def setting_rules(self) -> tuple[SettingRule, ...]:
        return (SettingRule("deterministic", (False,), "plain PyTorch's products depend on the batch"),)

    def device_count(self) -> int:
        return MAX_DEVICES

    def memory_bytes(self) -> int:
        return TOTAL_BYTES

    def runtime(self, config: EngineConfig) -> NpuRuntime:
        from quire_fake_npu.runtime import NpuRuntime

        return NpuRuntime(self.local_device(config), is_async=self.is_async)

    def runner_class(self) -> str:
        return "quire.worker.device_runner:DeviceRunner"

    def select_kernels(self, *, deterministic: bool = False) -> None:
        from quire.kernels import ops
        from quire_fake_npu import kernels  # registers them

        assert kernels
        ops.select(self.name, deterministic=deterministic)

    def attention_backends(self) -> list[str]:
        return ["quire_fake_npu.attention:NpuBackend", "quire.attention.reference:ReferenceBackend"]

    def upload_stream(self, device: object) -> NpuUploads:
        from quire_fake_npu.runtime import NpuUploads

        return NpuUploads()

    def communicator(self, config: EngineConfig) -> Communicator | None:
        parallel = config.parallel
        if parallel.tensor_parallel_size == 1:
            return None
        from quire_fake_npu.communicator import NpuGroup

        return NpuGroup(parallel.rank, parallel.tensor_parallel_size, parallel.rendezvous)
