"""A device behind a module of torch that is built as `torch.cuda` is: events, streams, pinned memory, captured graphs.

`torch.cuda` serves NVIDIA's GPUs and, in a ROCm build, AMD's; `torch.xpu` serves Intel's and has the same names. What differs
is in the platforms' own files. Importing it loads no torch. Knows nothing of models or of how a step is built.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from quire.platforms.interface import DeviceEvent, DeviceMemory, DeviceRuntime, Platform, RecordedStep, UploadStream

if TYPE_CHECKING:
    import torch

    from quire.config import EngineConfig
    from quire.distributed.communicator import Communicator

COPY_BYTES = 2 << 30
"""Far beyond any cache."""


def torch_module(kind: str) -> Any:
    """`torch.cuda` or its like, by the type of its devices."""
    return importlib.import_module(f"torch.{kind}")


class TorchEvent(DeviceEvent):
    """An event on the current stream.

    Args:
        gpu: the module of torch.
    """

    def __init__(self, gpu: Any) -> None:
        self._event = gpu.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def hold_back(self, stream: Any) -> None:
        """What the stream gets from now on begins after this event."""
        stream.wait_event(self._event)

    def milliseconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, TorchEvent)
        return earlier._event.elapsed_time(self._event)


class TorchGraph(RecordedStep):
    """A captured graph."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self, num_tokens: int, num_logits: int) -> None:
        """Submit the whole graph."""
        self._graph.replay()


class PinnedMemory(DeviceMemory):
    """A GPU's memory, and pinned memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def device(self) -> torch.device:
        return self._device

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


class TorchUploads(UploadStream):
    """A stream beside the worker's."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = torch_module(device.type)
        self._main = self._gpu.current_stream(device)
        self._stream = self._gpu.Stream(device)

    def staging(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fence(self) -> None:
        self._stream.wait_stream(self._main)

    def submit(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        with self._gpu.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = TorchEvent(self._gpu)
            event.record()
        return event

    def join(self, event: DeviceEvent) -> None:
        assert isinstance(event, TorchEvent)
        event.hold_back(self._main)


class TorchGpuRuntime(PinnedMemory, DeviceRuntime):
    """One GPU, and the stream that the worker's thread submits to.

    Args:
        kind: type of the device: `cuda` or `xpu`.
        index: of the GPU, among those that the module counts.
    """

    loads_kernels_late = True

    def __init__(self, kind: str, index: int = 0) -> None:
        import torch

        super().__init__(torch.device(kind, index))
        self._gpu = torch_module(kind)
        self._gpu.set_device(self._device)
        # Graphs are captured on, and replayed to, a stream of our own; the default one would wait for everybody's. What runs
        # beside the steps gives way to them.
        self._stream = self._gpu.Stream(self._device, priority=-1)
        self._gpu.set_stream(self._stream)
        self._pool: Any = None

    def synchronize(self) -> None:
        self._gpu.synchronize(self._device)

    def memory_info(self) -> tuple[int, int]:
        free, total = self._gpu.mem_get_info(self._device)
        # What the allocator holds and does not use is free for this process.
        return free + self._gpu.memory_reserved(self._device) - self._gpu.memory_allocated(self._device), total

    def peak_memory(self) -> int:
        return self._gpu.max_memory_allocated(self._device)

    def memory_stats(self) -> dict[str, int]:
        reserved, allocated = self._gpu.memory_reserved(self._device), self._gpu.memory_allocated(self._device)
        return super().memory_stats() | {"reserved": reserved, "allocated": allocated}

    def record(self, function: Callable[[], Any], num_tokens: int, num_logits: int) -> RecordedStep | None:
        return self.capture(function)

    def bandwidth(self) -> float | None:
        import torch

        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        best = float("inf")
        for _ in range(6):
            begin, end = self.event(), self.event()
            begin.record()
            target.copy_(source)
            end.record()
            end.wait()
            best = min(best, end.milliseconds_since(begin))
        del source, target
        self._gpu.empty_cache()
        return 2 * COPY_BYTES / (best / 1e3)

    def event(self) -> DeviceEvent:
        return TorchEvent(self._gpu)

    @contextlib.contextmanager
    def beside_steps(self) -> Generator[None]:
        self._gpu.set_device(self._device)
        with self._gpu.stream(self._gpu.Stream(self._device)):
            yield

    def reads(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._gpu.current_stream(self._device))

    def adopt_thread(self) -> None:
        self._gpu.set_device(self._device)  # else the thread's first call would make a context on device 0

    def release_unused(self) -> None:
        self._gpu.empty_cache()


class TorchGpuPlatform(Platform):
    """What platforms of such devices have in common.

    Attributes:
        reads_peers: small sums may be one kernel's that reads the other GPUs' memory (`distributed/peer_memory.py`).
    """

    reads_peers = False

    def upload_stream(self, device: torch.device) -> UploadStream | None:
        return TorchUploads(device)

    def runner_class(self) -> str:
        return "quire.worker.device_runner:DeviceRunner"

    def communicator(self, config: EngineConfig) -> Communicator | None:
        parallel = config.parallel
        size, peers = parallel.tensor_parallel_size, self.reads_peers and not parallel.disable_custom_all_reduce
        if size == 1:
            return None
        from quire.distributed.nccl import NcclGroup

        return NcclGroup(parallel.rank, size, parallel.rendezvous, self.local_device(config), uses_peer_memory=peers)
