"""Launches that skip Triton's bookkeeping: a kernel that was launched before goes straight to its launcher.

For every launch Triton binds arguments to parameters, asks of each how it is specialised, writes options as text, and
checks globals: 20 to 60 µs on a host, which is what bounds a step that no graph replays. Here a launch is looked up by what
decides the compiled kernel: its constants and options by value, and for each other argument the class that Triton tells
apart. What is not known yet, or not plain, goes Triton's way. Classes are compared with Triton's own when this is
installed; a Triton that sees more, or is built otherwise, keeps its own launches.

Settings that Triton reads at each launch (TRITON_DEBUG) are those of a kernel's first; launch hooks are respected.
Knows Triton's `JITFunction` and our launcher; knows no kernel.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit
from triton.runtime.jit import JITFunction

from quire.kernels.triton.runtime.driver import Launcher
from quire.logger import init_logger

logger = init_logger(__name__)

_ONE, _ALIGNED, _OTHER = "1", "16", "32 bits"

Specialize = Callable[[Any], Any]
"""How Triton tells an argument from others: (type, key)."""


@functools.cache
def _unaligned(dtype: torch.dtype) -> str:
    """The class of a pointer to `dtype` that is no multiple of 16."""
    return f"{dtype}, unaligned"


def classify(args: Sequence[Any], classes: list[Any], specialize: Specialize) -> list[Any]:
    """Append the class of each argument to `classes`; gives what a launcher packs: addresses, numbers, descriptors.

    Args:
        specialize: Triton's answer, for arguments that are neither tensors nor numbers.

    Raises:
        OverflowError: an integer of more than 64 bits.
    """
    values: list[Any] = []
    for arg in args:
        kind = type(arg)
        value = arg
        if kind is Tensor:
            value = arg.data_ptr()
            classes.append(_unaligned(arg.dtype) if value & 15 else arg.dtype)
        elif kind is int:
            if -0x80000000 <= arg < 0x80000000:
                classes.append(_ONE if arg == 1 else _OTHER if arg & 15 else _ALIGNED)
            elif -(1 << 63) <= arg < 1 << 64:
                classes.append((arg < 1 << 63, arg & 15 == 0))
            else:
                raise OverflowError(arg)
        elif kind is float or kind is bool:
            classes.append(kind)
        elif arg is None:
            value = 0
            classes.append(None)
        elif isinstance(arg, Tensor):
            value = arg.data_ptr()
            classes.append(_unaligned(arg.dtype) if value & 15 else arg.dtype)
        else:
            classes.append(specialize(arg))
        values.append(value)
    return values


class _Site:
    """A kernel called with so many arguments by place and certain others by name: what it was compiled to, by class."""

    def __init__(self, kernel: JITFunction[Any], num_args: int, names: Sequence[str]) -> None:
        constants = {param.name: param.is_constexpr for param in kernel.params}
        self.num_args = num_args
        self.is_plain = not any(param.is_constexpr for param in kernel.params[:num_args]) and all(
            constants.get(name, True) for name in names
        )
        """Whether all that is given by name, and nothing else, is a constant or an option."""
        self.variants: dict[tuple[Any, ...], tuple[Launcher, int, Any]] = {}


def _add_site(kernel: Any, num_args: int, names: tuple[str, ...]) -> _Site:
    sites: dict[tuple[str, ...], _Site] = kernel.__dict__.setdefault("_quire_sites", {})
    return sites.setdefault(names, _Site(kernel, num_args, names))


def make_launch(
    stock_run: Callable[..., Any],
    specialize: Specialize,
    get_device: Callable[[], int],
    get_stream: Callable[[int], int],
) -> Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]:
    """What launches in place of `JITFunction.run`, and calls it for what is not known yet."""
    runtime = knobs.runtime

    def launch(kernel: Any, grid: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """On this thread's device and stream."""
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if (
            type(grid) is not tuple
            or kernel.pre_run_hooks
            or (enter is not None and getattr(enter, "calls", True))
            or (leave is not None and getattr(leave, "calls", True))
        ):
            return stock_run(kernel, *args, grid=grid, warmup=False, **named)
        names = tuple(named)
        try:
            site = kernel._quire_sites[names]
        except (AttributeError, KeyError):
            site = _add_site(kernel, len(args), names)
        if not site.is_plain or site.num_args != len(args):
            return stock_run(kernel, *args, grid=grid, warmup=False, **named)
        device = get_device()
        classes = [device, *named.values()]
        try:
            values = classify(args, classes, specialize)
            key = tuple(classes)
            known = site.variants.get(key)
        except (TypeError, OverflowError):  # a constant without a hash, or what Triton may know how to refuse
            return stock_run(kernel, *args, grid=grid, warmup=False, **named)
        if known is None:
            compiled = stock_run(kernel, *args, grid=grid, warmup=False, **named)
            launcher = getattr(compiled, "run", None)
            if isinstance(launcher, Launcher) and launcher.num_needed <= len(args):
                site.variants[key] = (launcher, compiled.function, compiled)
            return compiled
        launcher, function, compiled = known
        size = len(grid)
        y, z = grid[1] if size > 1 else 1, grid[2] if size > 2 else 1
        launcher.submit(grid[0], y, z, get_stream(device), function, values)
        return compiled

    return launch


_SAME = (
    *((-(1 << 31), -16, 0, 16, 32, 48, 1024, 65536, (1 << 31) - 16), (-3, 2, 3, 7, 8, 15, 17, 100, (1 << 31) - 1)),
    *((1 << 31, 1 << 40, -(1 << 40)), ((1 << 31) + 1, (1 << 40) + 8, -(1 << 31) - 1), (1 << 63,), ((1 << 63) + 8,)),
    *((1,), (True, False), (None,), (-1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 16.0, 1e-30, 1e300, float("inf"), float("nan"))),
)
"""Numbers that are of one class here each."""


def why_unfit(specialize: Specialize) -> str | None:
    """What in this Triton is not as `launch` takes it to be; None if nothing is."""
    parameters = inspect.signature(JITFunction.run).parameters
    kinds = [parameter.kind.name for parameter in parameters.values()]
    if list(parameters)[2:4] != ["grid", "warmup"] or kinds[1] != "VAR_POSITIONAL" or kinds[-1] != "VAR_KEYWORD":
        return f"JITFunction.run takes {', '.join(parameters)}"
    memory = torch.empty(4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    halves = memory[start : start + 2048].view(torch.float16)
    tensors = (
        (halves, halves[8:], halves[16:24], halves[64:], halves[:1], halves[128:].view(4, -1).t()),
        (halves[1:], halves[2:], halves[4:], halves[7:9]),
    )
    for alike in (*_SAME, *tensors):
        try:
            answers = {str(specialize(member)) for member in alike}
        except Exception as error:
            return f"arguments cannot be classified ({type(error).__name__}: {error})"
        if len(answers) > 1:
            return f"{', '.join(str(member) for member in alike)[:200]} are told apart: {', '.join(sorted(answers))}"
    return None


@functools.cache
def _stock() -> tuple[Callable[..., Any], Specialize]:
    """Triton's own launch, and how it specialises an argument.

    Raises:
        AttributeError: this Triton has no such function.
    """
    native, backend = jit.native_specialize_impl, make_backend(GPUTarget("cuda", 90, 32))
    return JITFunction.run, lambda arg: native(backend, arg, False, True, True)


def install(get_device: Callable[[], int], get_stream: Callable[[int], int]) -> bool:
    """Launch every kernel of this process so, where Triton is as we know it; whether it is. May be called again."""
    try:
        stock_run, specialize = _stock()
        why = why_unfit(specialize)
    except (AttributeError, TypeError) as error:
        why = str(error)
    if why is not None:
        logger.info("Kernels are launched by Triton %s itself, which costs the host more: %s", _version(), why)
        return False
    launch = make_launch(stock_run, specialize, get_device, get_stream)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if warmup:
            return stock_run(kernel, *args, grid=grid, warmup=True, **named)
        return launch(kernel, grid, args, named)

    def on_grid(kernel: Any, grid: Any) -> Callable[..., Any]:
        """`kernel[grid]`. Whoever has put something in the place of `run` is asked."""
        if JITFunction.run is not run:
            return functools.partial(kernel.run, grid=grid, warmup=False)
        return lambda *args, **named: launch(kernel, grid, args, named)

    JITFunction.run, JITFunction.__getitem__ = run, on_grid
    return True


def _version() -> str:
    import triton

    return triton.__version__
