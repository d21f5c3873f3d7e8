"""The device runtime: memory figures, events, copies, all asked of the driver."""

import time
from collections.abc import Callable
from typing import Any

import torch

from quire.platforms.interface import DeviceEvent, DeviceRuntime, RecordedStep, UploadStream
from quire_fake_npu.driver import TOTAL_BYTES, driver


class NpuEvent(DeviceEvent):
    """A place in the queue of copies to the host; everything else is done when it is submitted."""

    def __init__(self) -> None:
        self._number, self._seconds = 0, 0.0

    def record(self) -> None:
        self._number, self._seconds = driver().npu_submitted(), time.perf_counter()

    def wait(self) -> None:
        driver().npu_wait(self._number)

    def milliseconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, NpuEvent)
        return (self._seconds - earlier._seconds) * 1e3


class NpuUploads(UploadStream):
    """The device copies from any host memory, at once."""

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fence(self) -> None:
        """What was submitted before is done."""

    def submit(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        target.copy_(source)
        event = NpuEvent()
        event.record()
        return event

    def join(self, event: DeviceEvent) -> None:
        """The copy is done."""


class NpuRuntime(DeviceRuntime):
    """One device, by its number on this host.

    Args:
        is_async: it has events of its own; else Quire's, which wait for everything.
    """

    def __init__(self, index: int, *, is_async: bool) -> None:
        self._driver, self._is_async = driver(), is_async
        self._device = torch.device("npu", index)

    def device(self) -> torch.device:
        return self._device

    def synchronize(self) -> None:
        self._driver.npu_wait(self._driver.npu_submitted())

    def memory_info(self) -> tuple[int, int]:
        return TOTAL_BYTES - self._driver.npu_memory_in_use(), TOTAL_BYTES

    def peak_memory(self) -> int:
        return self._driver.npu_memory_peak()

    def record(self, function: Callable[[], Any], num_tokens: int, num_logits: int) -> RecordedStep | None:
        return None

    def event(self) -> DeviceEvent:
        return NpuEvent() if self._is_async else super().event()
