"""What a platform (a kind of device) is: one class, found by an entry point or built in. Nothing above asks `is_cuda()`.

Names no torch type at run time, so that the configuration can ask a platform questions without importing torch.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from quire.errors import Explained

if TYPE_CHECKING:
    import torch

    from quire.config import EngineConfig
    from quire.distributed.communicator import Communicator


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What the device can do. Asked at each decision instead of its name.

    Attributes:
        dtypes: weight types it computes with, best first; `dtype=auto` takes the checkpoint's if it is in here.
        activation_dtype: type of the buffers between layers; `model` means the weights' own type.
        graphs: `none`, `decode` or `whole_step`: how much of a step can be recorded and replayed.
        async_output: results can be fetched while the next step runs.
        max_num_batched_tokens, max_num_seqs: defaults (offline, server) when the user gives none.
        min_prefill_tokens: prompt tokens that a step can have almost for nothing.
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


class RecordedStep(abc.ABC):
    """A step that was recorded once and can be run again without Python between its kernels."""

    @abc.abstractmethod
    def replay(self, num_tokens: int, num_logits: int) -> None:
        """Run it for this many tokens and logits rows (at most those it was recorded with)."""


class DeviceEvent(abc.ABC):
    """A point in the device's queue of work."""

    @abc.abstractmethod
    def record(self) -> None:
        """Mark the end of what was submitted so far."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block this thread until the device has come there."""

    @abc.abstractmethod
    def milliseconds_since(self, earlier: DeviceEvent) -> float:
        """Device time between two events that were both reached."""


class UploadStream(abc.ABC):
    """Copies from host memory to the device that run beside everything else it does."""

    @abc.abstractmethod
    def staging(self, num_bytes: int) -> torch.Tensor:
        """Host memory (bytes) that the device reads without the host's help."""

    @abc.abstractmethod
    def fence(self) -> None:
        """Copies that are submitted from now on begin after what the device's own queue has had until now."""

    @abc.abstractmethod
    def submit(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        """Start a copy of bytes; the source may be written again when the event has come. Any thread may call it."""

    @abc.abstractmethod
    def join(self, event: DeviceEvent) -> None:
        """What goes to the device's own queue from now on begins after that copy."""


class VendorProfiler(Protocol):
    """A profiler that runs around the process, and is told where to look."""

    def start(self) -> None:
        """Look from here on."""
        ...

    def stop(self) -> None:
        """Look away."""
        ...

    def push_range(self, name: str) -> None:
        """Something with a name begins."""
        ...

    def pop_range(self) -> None:
        """It ends."""
        ...


class DeviceRuntime(abc.ABC):
    """The only object that touches torch.cuda and its like."""

    @abc.abstractmethod
    def device(self) -> torch.device:
        """This worker's device."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for everything submitted."""

    @abc.abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory that this process may use."""

    @abc.abstractmethod
    def peak_memory(self) -> int:
        """Peak bytes this process has had allocated on the device since the worker started."""

    def kv_cache_cap(self) -> Explained[int] | None:
        """Bytes that pages may take unless the user names a size; None where the configured share is the only limit."""
        return None

    @abc.abstractmethod
    def record(self, function: Callable[[], Any], num_tokens: int, num_logits: int) -> RecordedStep | None:
        """Call `function` once, recording its kernels over buffers with `num_tokens` and `num_logits` rows (whether they
        also compute is the device's choice); None where nothing can be recorded (the step then runs eagerly)."""

    def bandwidth(self) -> float | None:
        """Bytes a second that the device's own memory moves, measured now with a large copy (read plus written); None where
        the host measures its own."""
        return None

    # What a device that works beside the host has more (`Capabilities.async_output`).

    def event(self) -> DeviceEvent:
        """A new event, which can be timed."""
        raise NotImplementedError(f"{type(self).__name__} has no events")

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory from and to which the device copies without the host's help."""
        return tensor

    def capture(self, function: Callable[[], Any]) -> RecordedStep | None:
        """Record the kernels that `function` submits, at fixed sizes, without running them; None where that is not possible.
        `replay` then ignores its arguments."""
        return None

    loads_kernels_late = False
    """Whether kernels are compiled or loaded when they are first launched."""

    def rehearse(self, launch_all: Callable[[], Any], *, feature: str = "") -> None:
        """Prepare every kernel that `launch_all` launches. It is called with launches that do nothing, or not at all.

        Args:
            feature: what needs these kernels; empty for steps, which come first.
        """

    def await_kernels(self) -> None:
        """Wait until the kernels of all steps are compiled."""

    def is_compiled(self, feature: str) -> bool:
        """Whether a feature's kernels are, as far as is known."""
        return True

    def hasten(self, feature: str) -> None:
        """A request waits for this feature's kernels."""

    def beside_steps(self) -> contextlib.AbstractContextManager[Any]:
        """What this thread submits within goes beside the steps' work."""
        return contextlib.nullcontext()

    def settled(self) -> None:
        """Every feature has been used."""

    def adopt_thread(self) -> None:
        """The calling thread is going to wait for this device's events."""

    def profiler_activities(self) -> list[Any]:
        """What torch's profiler can watch besides the host: `ProfilerActivity` values."""
        return []

    def vendor_profiler(self) -> VendorProfiler | None:
        """The vendor's own profiler; None where there is none."""
        return None

    def release_unused(self) -> None:
        """Give memory that is held but not in use back to the device."""

    def started(self) -> None:
        """The engine is ready for requests."""

    def close(self) -> None:
        """The engine ends; may be called twice."""


class Platform(abc.ABC):
    """A kind of device. `name` is what `--device` and kernels call it."""

    name: str

    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """Asked by the configuration (any process, no torch import if it can be helped)."""

    @abc.abstractmethod
    def check_config(self, config: EngineConfig) -> EngineConfig:
        """The last word on a configuration: raise ConfigError for what cannot work here, or return a changed copy."""

    def begin_start(self, config: EngineConfig) -> None:
        """An engine starts in this process, torch is not imported yet: begin what can happen beside."""

    @abc.abstractmethod
    def runtime(self, config: EngineConfig) -> DeviceRuntime:
        """Made once in each worker, before the model."""

    @abc.abstractmethod
    def select_kernels(self, *, deterministic: bool = False) -> None:
        """Register this platform's kernels and choose one for every operation; once in each worker. `deterministic`: only
        kernels whose rows do not depend on the batch."""

    def memory_bytes(self) -> int | None:
        """Memory of one device in all, in bytes, found without opening the device; None where that cannot be told."""
        return None

    @abc.abstractmethod
    def attention_backends(self) -> list[str]:
        """Class paths (`module:attribute`) of the backends to ask, best first."""

    def upload_stream(self, device: torch.device) -> UploadStream | None:
        """For weights on their way to the device; None where they are used where they lie."""
        return None

    def runner_class(self) -> str:
        """Class path of the worker's model runner."""
        return "quire.worker.model_runner:ModelRunner"

    def communicator(self, config: EngineConfig) -> Communicator | None:
        """Joins this worker's tensor-parallel group; None for one rank. Called once in each worker, after `runtime`.

        Raises:
            ConfigError: this platform has no communicator.
        """
        return None

    def worker_class(self) -> str:
        """Class path of the worker."""
        return "quire.worker.worker:Worker"
