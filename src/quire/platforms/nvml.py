"""Which NVIDIA GPUs this process may use, asked of the driver's management library: no torch, no context on the device."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Name, compute capability and bytes of memory."""

    name: str
    capability: tuple[int, int]
    memory: int


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


@functools.cache
def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA will count, in its order; empty where there is no driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if library.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        gpus = [_describe(library, index) for index in range(count.value)]
    finally:
        library.nvmlShutdown()
    return tuple(gpus[index] for index in _visible_indices(len(gpus)))


def _describe(library: ctypes.CDLL, index: int) -> Gpu:
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
    library.nvmlDeviceGetName(device, name, ctypes.c_uint(len(name)))
    library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return Gpu(name.value.decode(), (major.value, minor.value), memory.total)


def _visible_indices(count: int) -> list[int]:
    """CUDA_VISIBLE_DEVICES as indices; devices that it names by UUID are taken to be the first ones."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return list(range(count))
    indices: list[int] = []
    for number, entry in enumerate(part.strip() for part in setting.split(",") if part.strip()):
        index = int(entry) if entry.lstrip("-").isdigit() else number
        if not 0 <= index < count:  # CUDA ignores what follows an index that does not exist
            break
        indices.append(index)
    return indices
