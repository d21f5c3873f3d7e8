"""How kernels are launched: what all of them share.

Programmatic dependent launch (compute capability 9.0 and up): a kernel may start while the one before it still runs, and
waits where it first needs that one's results. Rules for a kernel that takes `PDL: tl.constexpr`:

- `await_previous(PDL)` stands before the first access to memory that any earlier kernel writes, or reads and this one
  writes. Weights and other constants may be loaded before it.
- The next kernel may take up room beside this one right after that wait; with `EARLY=True` before it. A kernel that asks for
  memory between the two calls `gdc_launch_dependents` and `gdc_wait` itself.
- Every program of the kernel comes past the wait, also one that has nothing to do.
- The embedding waits before it lets others start. So what stands before it in a step (lengths, page tables, slots,
  positions), and pages that earlier steps wrote, are complete for every kernel after it, which may read them before its wait.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda as _cuda

from quire.kernels.registry import kernel

gdc_wait = _cuda.gdc_wait
gdc_launch_dependents = _cuda.gdc_launch_dependents

Params = ParamSpec("Params")
MadeT = TypeVar("MadeT")
FunctionT = TypeVar("FunctionT", bound=FunctionType)

__all__ = [
    "arrivals",
    "await_previous",
    "gdc_launch_dependents",
    "gdc_wait",
    "interpreted",
    "launch_options",
    "next_power_of_2",
    "num_processors",
    "per_queue",
    "tl",
    "two_ways",
]


@triton.jit
def await_previous(PDL: tl.constexpr, EARLY: tl.constexpr = False):
    """Wait for the kernel before this one, and let the next one start: after the wait, or before it if EARLY."""
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()


def two_ways(op: str, **options: Any) -> Callable[[FunctionT], FunctionT]:
    """Decorator: the implementation of an operation that is fastest for a number of rows and, called with `is_invariant`, the one
    whose rows do not depend on the others. `options`: as of `registry.kernel`."""

    def register(function: FunctionT) -> FunctionT:
        kernel(op, platform="cuda", priority=10, invariant=False, **options)(function)
        invariant: Any = functools.update_wrapper(functools.partial(function, is_invariant=True), function)
        invariant.__qualname__ = f"invariant_{function.__name__}"
        kernel(op, platform="cuda", priority=5, **options)(invariant)
        return function

    return register


def next_power_of_2(count: int) -> int:
    """The smallest power of two from `count` on. Triton's own takes a fifth of a launch when the host calls it."""
    return 1 << max(count - 1, 0).bit_length()


def cdiv(count: int, size: int) -> int:
    """How many blocks of `size` cover `count`."""
    return -(-count // size)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(knobs.runtime.interpret)


_vendor = "nvidia"


def set_vendor(name: str) -> None:
    """Whose GPUs kernels are for: `nvidia`, `amd` or `intel`. A platform says it before kernels are imported."""
    global _vendor
    _vendor = name
    for known in (compute_capability, has_dependent_launch, num_processors, launch_options):
        known.cache_clear()


def is_nvidia() -> bool:
    """Whether kernels may hold NVIDIA's assembly (PTX); not in the interpreter either."""
    return _vendor == "nvidia" and not interpreted()


@functools.cache
def compute_capability() -> tuple[int, int]:
    """NVIDIA's number for the device; (0, 0) for others' devices and in the interpreter."""
    return torch.cuda.get_device_capability() if is_nvidia() and torch.cuda.is_available() else (0, 0)


def current_device() -> int:
    """The number of this thread's device."""
    return torch.xpu.current_device() if _vendor == "intel" else torch.cuda.current_device()


@functools.cache
def has_dependent_launch() -> bool:
    """Whether this device can start a kernel before its predecessor has ended."""
    return compute_capability()[0] >= 9


@functools.cache
def num_processors() -> int:
    """Multiprocessors of the device; a small number in the interpreter."""
    if interpreted():
        return 4
    if _vendor == "intel":
        return torch.xpu.get_device_properties(current_device()).max_compute_units
    return torch.cuda.get_device_properties(current_device()).multi_processor_count


def _current_queue() -> int:
    """The number of the stream to which this thread submits; 0 in the interpreter."""
    return 0 if interpreted() else triton.runtime.driver.active.get_current_stream(current_device())


def per_queue(make: Callable[Params, MadeT]) -> Callable[Params, MadeT]:
    """Keeps what a function makes, for each of the device's queues its own: launches in two of them overlap, and memory that a
    launch leaves as it found it is for one at a time."""
    kept = functools.cache(lambda _queue, *args, **named: make(*args, **named))

    @functools.wraps(make)
    def of_this_queue(*args: Params.args, **named: Params.kwargs) -> MadeT:
        return kept(_current_queue(), *args, **named)

    return of_this_queue


@per_queue
def arrivals(owner: str, device: torch.device, size: int) -> torch.Tensor:
    """Counters of the programs that have left their part of a sum, zero between launches. Each family of kernels, the owner, has
    its own: launches of two may overlap."""
    return torch.zeros(size, dtype=torch.int32, device=device)


@functools.cache
def launch_options() -> dict[str, Any]:
    """What every launch of a kernel with a `PDL` argument passes: `kernel[grid](..., **launch_options())`."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch() else {"PDL": False}
