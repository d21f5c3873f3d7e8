"""What a start on an NVIDIA GPU does while it imports torch: make the device's context, bring torch's libraries into memory.

Both are system calls that leave Python free. Knows the driver's library and files; imports neither torch nor Triton.
"""

import contextlib
import ctypes
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from quire.logger import init_logger
from quire.timeline import STARTUP

logger = init_logger(__name__)

LIBRARIES = ("libtorch_python.so", "libnvrtc.so.*", "libnvJitLink.so.*", "libtorch_cpu.so")
"""Of the files that torch maps, those of which an import reads half or more: 0.7 of 3.4 GB. Of the others it reads little, and
reading them whole would keep the disk from what is waited for."""
_CHUNK = 8 << 20


def begin(device: int) -> list[threading.Thread]:
    """Start both, each in a thread; nobody has to wait for them."""
    threads = [
        threading.Thread(target=create_context, args=(device,), name="device-context", daemon=True),
        threading.Thread(target=read_ahead, name="libraries", daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def create_context(device: int) -> bool:
    """Make the primary context of a device, which torch then finds; whether that worked. Torch says what is wrong if not."""
    with STARTUP.phase("context", is_beside=True):
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            logger.debug("no CUDA driver: %s", error)
            return False
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        return not (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(handle), device)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        )


def read_ahead() -> int:
    """Ask the system to read the libraries that are not in memory; their number of bytes."""
    total = 0
    with STARTUP.phase("libraries", is_beside=True) as phase:
        for file in _library_files():
            with contextlib.suppress(OSError):
                total += _read_file_ahead(file)
        phase.note = f"{total / 1e9:.1f} GB"
    return total


def _library_files() -> Iterator[Path]:
    folders: list[Path] = []
    for package, places in (("torch", ("lib",)), ("nvidia", ("*/lib",)), ("triton", ("_C",))):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(package)
            roots = list(spec.submodule_search_locations or ()) if spec is not None else []
            folders += [folder for root in roots for place in places for folder in Path(root).glob(place)]
    for pattern in LIBRARIES:
        for folder in folders:
            yield from folder.glob(pattern)


def _read_file_ahead(file: Path) -> int:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        for at in range(0, size, _CHUNK):
            os.posix_fadvise(descriptor, at, _CHUNK, os.POSIX_FADV_WILLNEED)
        return size
    finally:
        os.close(descriptor)
