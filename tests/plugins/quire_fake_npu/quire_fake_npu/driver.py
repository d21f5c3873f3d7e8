"""The device's driver: `device.cpp`, built once for each version of torch, and introduced to torch under the name `npu`.

A real device's driver comes with its torch extension (torch_npu and the like); a plugin then only imports that.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import types
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
TOTAL_BYTES = 2 << 30
"""Memory of one device."""
MAX_DEVICES = 8


@functools.cache
def driver() -> ctypes.CDLL:
    """The loaded driver; its first call in a process makes the device known to torch."""
    import torch

    library = ctypes.CDLL(str(_built(torch.__version__, Path(torch.__file__).parent)))
    for name in ("npu_memory_in_use", "npu_memory_peak", "npu_submitted"):
        getattr(library, name).restype = ctypes.c_int64
    for name in ("npu_wait", "npu_start"):
        getattr(library, name).argtypes = [ctypes.c_int64]
    library.npu_start(TOTAL_BYTES)
    torch.utils.rename_privateuse1_backend("npu")
    module = types.ModuleType("torch.npu")
    vars(module).update(is_available=lambda: True, device_count=lambda: MAX_DEVICES)
    vars(module).update(_is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None)
    torch._register_device_module("npu", module)
    return library


def _built(version: str, torch_folder: Path) -> Path:
    """The shared library, from the cache or from the compiler: about 15 seconds."""
    key = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire_fake_npu"
    library, unfinished = folder / f"{key}.so", folder / f"{key}.unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that start together one compiles
        if not library.exists():
            include = torch_folder / "include"
            words = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", str(SOURCE), "-o", str(unfinished)]
            words += [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{torch_folder}/lib"]
            subprocess.run([*words, "-ltorch_cpu", "-lc10"], check=True)
            unfinished.replace(library)
    return library
