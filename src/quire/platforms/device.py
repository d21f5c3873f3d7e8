"""A device as the worker sees it: its memory and the host's beside it, events, copies, recorded steps.

A platform's runtime is made once in each worker (`Platform.runtime`) and called by the worker's threads alone; it is the only
object that touches a module such as `torch.cuda`. Names no torch type at run time. What is not abstract has a default that is
right for a device which computes when it is told to; what a device that works beside the host has more
(`Capabilities.async_output`) stands at the end of `DeviceRuntime`.
"""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.errors import Explained

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class DeviceMemory(abc.ABC):
    """A device's memory, and the host's beside it. Workers make every buffer that crosses between the two here.

    Attributes:
        is_host: the device computes in the host's own memory, so that nothing has to be copied to it.
    """

    is_host: bool = False

    @abc.abstractmethod
    def device(self) -> torch.device:
        """This worker's device."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor in memory from and to which the device copies without the host's help; the tensor itself where
        there is no such memory (`Capabilities.pinning`)."""
        return tensor

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory of that kind, not filled: where results arrive."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """A copy on the device that arrives in order with its work; the host does not wait."""
        import torch

        if self.is_host:
            return torch.from_numpy(array.copy())
        host = torch.from_numpy(array if array.flags.c_contiguous else array.copy(order="C"))
        return self.pinned(host).to(self.device(), non_blocking=True)

    def mirrored(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros on the host and on the device, for values that the host writes again and again: one tensor where both have one
        memory."""
        import torch

        host = self.host_empty((size,), dtype).zero_()
        return host, host if self.is_host else torch.zeros(size, dtype=dtype, device=self.device())


def is_host_memory(device: torch.device) -> bool:
    """Whether tensors of a device lie in the host's own memory. The one place that asks a device for its name."""
    return device.type == "cpu"


class HostMemory(DeviceMemory):
    """The host's own memory as a device's."""

    is_host = True

    def device(self) -> torch.device:
        """The CPU."""
        import torch

        return torch.device("cpu")


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


class QueueEvent(DeviceEvent):
    """An event of a device that computes when it is told to: reached when it is recorded. What may still be on its way, such as a
    copy to the host, is waited for with everything else.

    Args:
        synchronize: waits for everything submitted.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize, self._seconds = synchronize, math.nan

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def wait(self) -> None:
        self._synchronize()

    def milliseconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, QueueEvent)
        milliseconds = (self._seconds - earlier._seconds) * 1e3
        if math.isnan(milliseconds):
            raise ValueError("both events must be recorded before the time between them is known")
        return milliseconds


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


class SleepPool:
    """Memory that an engine gives back while it sleeps. The worker calls it in its own thread, with no step in flight. This class
    gives nothing back: it is for devices whose memory is the host's.

    Tags are `weights` and `pages`.
    """

    def allocating(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        """What is allocated within belongs to a tag; for pools that have to know."""
        return contextlib.nullcontext()

    def park(self, model: Any) -> None:
        """Weights go to host memory and their memory on the device is given back. Every tensor object of the model stays."""

    def restore(self) -> None:
        """Take memory of the device again, and fill it; nothing if nothing is parked."""

    def discard(self, tag: str) -> None:
        """What belongs to a tag is forgotten; nobody refers to it any more."""

    def usage(self) -> dict[str, int]:
        """Bytes that wait in host memory, by tag."""
        return {}


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


class DeviceRuntime(DeviceMemory):
    """The only object that touches torch.cuda and its like."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for everything submitted."""

    @abc.abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory that this process may use."""

    @abc.abstractmethod
    def peak_memory(self) -> int:
        """Peak bytes this process has had allocated on the device since the worker started."""

    def memory_stats(self) -> dict[str, int]:
        """Bytes by name, for `quire explain` and the log; a platform adds what its allocator tells."""
        free, total = self.memory_info()
        return {"free": free, "total": total, "peak": self.peak_memory()}

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
        return QueueEvent(self.synchronize)

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

    def reads(self, tensor: torch.Tensor) -> None:
        """What this thread submits next reads a tensor that was made in a thread beside the steps: its memory is not used anew
        before."""

    def adopt_thread(self) -> None:
        """The calling thread is going to wait for this device's events."""

    def profiler_activities(self) -> list[Any]:
        """What torch's profiler can watch besides the host: `ProfilerActivity` values."""
        return []

    def vendor_profiler(self) -> VendorProfiler | None:
        """The vendor's own profiler; None where there is none."""
        return None

    def sleep_pool(self) -> SleepPool | None:
        """A pool of the platform's own, made once; None: weights are parked by resizing their storages."""
        return None

    def release_unused(self) -> None:
        """Give memory that is held but not in use back to the device."""

    def started(self) -> None:
        """The engine is ready for requests."""

    def close(self) -> None:
        """The engine ends; may be called twice."""
