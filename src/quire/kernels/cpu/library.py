"""The compiled kernels: finding and loading the library, its threads, and running one operation.

Knows no operation's meaning and nothing of models. Loaded at first use, once for each process.
"""

import ctypes
import functools
import pathlib
from typing import Protocol

import torch

from quire import envs
from quire.errors import ConfigError
from quire.kernels.cpu.build import LIBRARY, source_hash

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of weights and caches, by the number that the library gives them."""

_HUGE_PAGE = 2 << 20
_ARENA_BYTES = 64 << 20


class Recorder(Protocol):
    """Is told of every operation while it is set as `Library.recorder`; unless `runs`, operations are only noted."""

    runs: bool

    def append(
        self, operation: int, arguments: ctypes.Structure, rows: int, tensors: tuple[torch.Tensor | None, ...]
    ) -> None: ...

    def refuse(self, why: str) -> None: ...


class Library:
    """The loaded library.

    Args:
        path: the shared object.
        isa: an instruction set's name, or None for the best that this machine runs.

    Raises:
        OSError: it cannot be loaded.
        ConfigError: this machine cannot run that instruction set.
    """

    def __init__(self, path: pathlib.Path, isa: str | None) -> None:
        self._native = ctypes.CDLL(str(path))
        self._declare()
        self.sources: str = self._native.quire_cpu_sources().decode()
        self.isas: list[str] = self._native.quire_cpu_isas().decode().split(",")
        chosen = self._native.quire_cpu_select((isa or "").encode())
        if chosen is None:
            raise ConfigError(f"QUIRE_CPU_ISA is {isa!r}, but this machine and build can run: {', '.join(self.isas)}")
        self.isa: str = chosen.decode()
        self.recorder: Recorder | None = None
        self._operations: dict[str, int] = {}
        self._arena: torch.Tensor | None = None
        self._arena_used = 0

    def _declare(self) -> None:
        pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        signatures = {
            "quire_cpu_sources": (ctypes.c_char_p, []),
            "quire_cpu_isas": (ctypes.c_char_p, []),
            "quire_cpu_select": (ctypes.c_char_p, [ctypes.c_char_p]),
            "quire_cpu_operation": (pointer, [ctypes.c_char_p]),
            "quire_cpu_set_threads": (None, [integer]),
            "quire_cpu_threads": (integer, []),
            "quire_cpu_set_spin": (None, [long]),
            "quire_cpu_use_huge_pages": (None, [pointer, long]),
            "quire_cpu_run": (None, [pointer, pointer, long]),
            "quire_cpu_program_new": (pointer, []),
            "quire_cpu_program_add": (None, [pointer, pointer, pointer, long, integer, long]),
            "quire_cpu_program_run": (None, [pointer, long, long]),
            "quire_cpu_program_free": (None, [pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._native, name)
            function.restype, function.argtypes = result, arguments
        self._run = self._native.quire_cpu_run
        self.program_new = self._native.quire_cpu_program_new
        self.program_add = self._native.quire_cpu_program_add
        self.program_run = self._native.quire_cpu_program_run
        self.program_free = self._native.quire_cpu_program_free

    def operation(self, name: str) -> int:
        """The address of an operation of the chosen instruction set."""
        if name not in self._operations:
            address = self._native.quire_cpu_operation(name.encode())
            if address is None:
                raise LookupError(f"the CPU kernel library has no operation {name!r}: build it again")
            self._operations[name] = address
        return self._operations[name]

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for weights, which lie side by side on huge pages: a decode step reads 5 % faster than over
        small pages (AMD Zen 3, 512 x 1536 and 1024 x 512 in bfloat16). Memory returns to the system with the last weight
        of a chunk."""
        size = (count * dtype.itemsize + 63) // 64 * 64
        if self._arena is None or self._arena_used + size > self._arena.numel():
            memory = torch.empty(max(size, _ARENA_BYTES) + _HUGE_PAGE, dtype=torch.uint8)
            self._arena, self._arena_used = memory[-memory.data_ptr() % _HUGE_PAGE :], 0
            self._native.quire_cpu_use_huge_pages(self._arena.data_ptr(), max(size, _ARENA_BYTES))
        part = self._arena[self._arena_used : self._arena_used + count * dtype.itemsize]
        self._arena_used += size
        return part.view(dtype)

    def run(
        self, operation: int, arguments: ctypes.Structure, rows: int, tensors: tuple[torch.Tensor | None, ...]
    ) -> None:
        """Run one operation with all threads, and tell the recorder. `tensors` are those that `arguments` points to."""
        if self.recorder is None or self.recorder.runs:
            self._run(operation, ctypes.byref(arguments), rows)
        if self.recorder is not None:
            self.recorder.append(operation, arguments, rows, tensors)

    def set_num_threads(self, count: int) -> None:
        """Use `count` threads, the caller's included."""
        if count < 1:
            raise ConfigError(f"the number of CPU threads is {count}; it must be at least 1")
        self._native.quire_cpu_set_threads(count)

    def num_threads(self) -> int:
        """Threads in use; makes the pool if there is none yet."""
        return self._native.quire_cpu_threads()

    def set_spin(self, microseconds: float) -> None:
        """How long a thread waits for the next step before it sleeps (50 µs unless set)."""
        self._native.quire_cpu_set_spin(int(microseconds * 1000))


@functools.cache
def load() -> tuple[Library | None, str]:
    """The library, or None and why it cannot serve."""
    path = pathlib.Path(__file__).resolve().with_name(LIBRARY)
    if not path.exists():
        return None, (
            f"the CPU kernel library {LIBRARY} is not built: install a C++17 compiler and run `python -m quire.kernels.cpu.build`"
        )
    try:
        found = Library(path, envs.QUIRE_CPU_ISA)
    except (OSError, AttributeError) as error:
        return None, f"the CPU kernel library {LIBRARY} does not load: {error}"
    if found.sources != source_hash():
        return None, (
            f"the CPU kernel library {LIBRARY} was built from other sources than those beside it: run "
            f"`python -m quire.kernels.cpu.build`"
        )
    return found, ""


def library() -> Library:
    """The library.

    Raises:
        RuntimeError: it is missing.
    """
    found, why = load()
    if found is None:
        raise RuntimeError(why)
    return found
