"""What a platform (a kind of device) is: one class, found by an entry point or built in. Nothing above asks `is_cuda()`.

Names no torch type at run time, so that the configuration can ask a platform questions without importing torch. Each method
says who calls it, in which process, when: the *frontend* is the user's or the server's process, the *core* the scheduler's, and
there is a *worker* for each device; with one device the worker lives in the core, and offline the core lives in the frontend.
What the worker asks of the device itself is in `platforms/device.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.config.kv_spec import KVCacheGroup, KVCacheSpec, group_layers
from quire.errors import Explained
from quire.platforms.device import (
    DeviceEvent,
    DeviceMemory,
    DeviceRuntime,
    HostMemory,
    RecordedStep,
    SleepPool,
    UploadStream,
    VendorProfiler,
    is_host_memory,
)

if TYPE_CHECKING:
    import torch

    from quire.config import EngineConfig
    from quire.config.hf_config import HFConfig
    from quire.distributed.communicator import Communicator

__all__ = [
    "Capabilities",
    "DeviceEvent",
    "DeviceMemory",
    "DeviceRuntime",
    "Explained",
    "HostMemory",
    "Platform",
    "RecordedStep",
    "SettingRule",
    "SleepPool",
    "UploadStream",
    "VendorProfiler",
    "WorkerProcess",
    "is_host_memory",
]


_NOT_CLAIMED = Explained(False, "the platform does not claim it")
_INDEX_TYPE = Explained("int64", "PyTorch's index type")


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What the device can do, each with a reason. Asked at each decision instead of its name. What has a default here is off
    until a platform claims it.

    Attributes:
        dtypes: weight types it computes with, best first; `dtype=auto` takes the checkpoint's if it is in here.
        activation_dtype: type of the buffers between layers; `model` means the weights' own type.
        graphs: `none`, `decode` or `whole_step`: how much of a step can be recorded and replayed.
        async_output: results can be fetched while the next step runs.
        fp8: it multiplies float8 values, and keeps them in pages.
        sleep: an engine can give memory back and take it again.
        page_alignment: tokens of a page are a multiple of this.
        max_num_batched_tokens, max_num_seqs: defaults (offline, server) when the user gives none.
        min_prefill_tokens: prompt tokens that a step can have almost for nothing.
        swap: pages can be moved to host memory and back.
        pinning: there is host memory from which the device copies without the host's help (`DeviceMemory.pinned`).
        tensor_parallel: several ranks can share each layer: there is a `communicator`.
        expert_parallel: ranks can have experts whole.
        pipeline_parallel: ranks can have some of the layers: there is a `stage_link_class`.
        computes_on_host: steps take the host's own cores, so that what else runs there makes them slower.
        slot_dtype: type of `AttentionMetadata.slot_mapping`: `int64` or `int32`.
        token_exchange: tokens can be sent to the ranks of their experts: the `communicator` has `all_to_all`.
        narrows: `dtype=auto` takes `dtypes[0]` for a checkpoint in float32.
    """

    dtypes: Explained[tuple[str, ...]]
    activation_dtype: Explained[str]
    graphs: Explained[str]
    async_output: Explained[bool]
    fp8: Explained[bool]
    sleep: Explained[bool]
    page_alignment: Explained[int]
    max_num_batched_tokens: Explained[tuple[int, int]]
    max_num_seqs: Explained[tuple[int, int]]
    min_prefill_tokens: Explained[int]
    swap: Explained[bool]
    pinning: Explained[bool] = _NOT_CLAIMED
    tensor_parallel: Explained[bool] = _NOT_CLAIMED
    expert_parallel: Explained[bool] = _NOT_CLAIMED
    pipeline_parallel: Explained[bool] = _NOT_CLAIMED
    computes_on_host: Explained[bool] = _NOT_CLAIMED
    slot_dtype: Explained[str] = _INDEX_TYPE
    token_exchange: Explained[bool] = _NOT_CLAIMED
    narrows: Explained[bool] = _NOT_CLAIMED


@dataclasses.dataclass(frozen=True)
class SettingRule:
    """What a platform makes of one engine setting (a field of `EngineArgs`).

    Attributes:
        allowed: values that work here.
        reset_to: in a tuple of one, what takes the place of any other value, with a warning; empty: another value is refused.
        why: ends the message.
    """

    setting: str
    allowed: tuple[Any, ...]
    why: str
    reset_to: tuple[Any, ...] = ()


def _loopback() -> dict[str, str]:
    import sys

    # The ranks of one host meet on its loopback device: no other host can connect.
    return {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


@dataclasses.dataclass(frozen=True)
class WorkerProcess:
    """How the process of one worker starts. It is always a fresh interpreter that may have children of its own, and it ends when
    the core's process does.

    Attributes:
        environment: variables for it; those that the user has set stay as they are.
        cores: of the host, on which it may run; None: all.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=_loopback)
    cores: frozenset[int] | None = None


class Platform(abc.ABC):
    """A kind of device, made once in each process that asks for one. `name` is what `--device` and kernels call it."""

    name: str

    # Any process, before anything is built. Importing torch here makes every start slower.

    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """Asked by the configuration and by everything that depends on what a device can do; any process, many times."""

    def memory_bytes(self) -> int | None:
        """Memory of one device in all, in bytes, found without opening the device; None where that cannot be told. Asked before a
        model is fetched, to refuse one that cannot fit."""
        return None

    def device_count(self) -> int | None:
        """Devices that this process may use, found without opening one; None where any number of ranks can share what there is.
        Asked by the configuration: more ranks are refused."""
        return None

    def device_name(self) -> str:
        """What people call the device, for `quire explain` and the log; found without opening it."""
        return self.name

    # Configuration: the frontend's process, once for each engine, in this order.

    def setting_defaults(self, hf_config: HFConfig) -> Mapping[str, Any]:
        """Values for settings that the user left open, for a model with this config.json (see `hf_config.model_type`)."""
        return {}

    def setting_rules(self) -> tuple[SettingRule, ...]:
        """What works here of settings, whoever set them. Applied before anything is derived from them."""
        return ()

    def check_config(self, config: EngineConfig) -> EngineConfig:
        """The last word on a configuration: raise ConfigError for what cannot work here, or return a changed copy. Rules of
        settings, numbers of ranks and the type of the weights have been checked."""
        return config

    # The core's process.

    def core_hooks(self) -> list[str]:
        """Class paths of `quire.engine.hooks.CoreHooks`: what this platform does at a core's turning points. Once a core."""
        return []

    def kv_groups(self, specs: list[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
        """Which layers share a page table, from what each layer keeps; asked before pages are counted, and by `quire explain`.
        The j-th layer of every group lives in tensor j."""
        return group_layers(specs)

    def worker_process(self, config: EngineConfig, rank: int) -> WorkerProcess:
        """How a rank's process starts; asked before each start, where workers have processes of their own."""
        return WorkerProcess()

    # The worker's process, in this order; each once, unless it says otherwise.

    def begin_start(self, config: EngineConfig) -> None:
        """An engine starts in this process, torch is not imported yet: begin what can happen beside."""

    def worker_class(self) -> str:
        """Class path of the worker."""
        return "quire.worker.worker:Worker"

    def local_device(self, config: EngineConfig) -> int:
        """Which of this host's devices a rank has: its number among those that the process sees."""
        parallel = config.parallel
        return parallel.device_number if parallel.device_index is None else parallel.device_index

    @abc.abstractmethod
    def runtime(self, config: EngineConfig) -> DeviceRuntime:
        """The device, opened for this rank; before the model is made."""

    @abc.abstractmethod
    def select_kernels(self, *, deterministic: bool = False) -> None:
        """Register this platform's kernels and choose one for every operation. `deterministic`: only kernels whose rows do not
        depend on the batch. `quire explain` calls it too, and conformance tests call it often."""

    def communicator(self, config: EngineConfig) -> Communicator | None:
        """Joins this worker's tensor-parallel group; None for one rank. After `runtime`.

        Raises:
            ConfigError: this platform has no communicator.
        """
        return None

    def stage_link_class(self) -> str:
        """Class path of the `quire.distributed.stage_link.StageLink` through which stages of a pipeline hand over tensors; made
        after `communicator`, where there are several stages. This one uses the library that is registered for the device's type
        (`quire.distributed.groups.register_library`), else gloo by way of the host's memory."""
        return "quire.distributed.stage_link:TorchLink"

    def runner_class(self) -> str:
        """Class path of the worker's model runner: `quire.worker.model_runner:ModelRunner` computes in the host's own memory
        (`DeviceMemory.is_host`), `quire.worker.device_runner:DeviceRunner` is for devices with memory of their own, whether
        they work beside the host or not. Neither names a vendor."""
        return "quire.worker.model_runner:ModelRunner"

    def runner_components(self, config: EngineConfig) -> Mapping[str, str]:
        """Class paths of parts of the runner that this platform has of its own, by the fields of
        `quire.worker.components.RunnerComponents`. Each is a subclass of the part that it replaces."""
        return {}

    @abc.abstractmethod
    def attention_backends(self) -> list[str]:
        """Class paths (`module:attribute`) of the backends to ask, best first; asked when a model is built."""

    def upload_stream(self, device: torch.device) -> UploadStream | None:
        """For weights on their way to the device; None where they are used where they lie. Made for each load."""
        return None
