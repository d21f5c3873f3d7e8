#!/usr/bin/env python3
"""What a step that no graph replays costs the host: its launches, counted and timed without a GPU.

The runner stands on torch's meta device, kernels are compiled for a GPU that need not be there, and the driver's library
launches nothing; cuBLAS' products are left out. So what is timed is Python, Triton and our launcher. Both ways of launching
are gone through, Triton's own and ours (`direct_launch`), and their launches compared: the same kernels, grids and
arguments, byte by byte.

Usage: python tools/eager_step.py MODEL [--tokens 4096] [--requests 32] [--set quantization=fp8] [--profile] [--output FILE]
       MODEL is a folder with a config.json. About a minute; longer where kernels are not in the cache yet.
"""

import argparse
import collections
import cProfile
import ctypes
import dataclasses
import json
import pstats
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record_kernels

STEPS = 40
"""The fastest of so many is told: a machine that does other things only adds time."""


class SilentLibrary:
    """Of the driver's library, what a launch calls; the call itself goes to a C function that does next to nothing."""

    def __init__(self) -> None:
        self.cuLaunchKernelEx = ctypes.CDLL("libm.so.6").feclearexcept

    def cuFuncSetAttribute(self, *_: Any) -> int:
        """Allowed."""
        return 0

    def cuTensorMapEncodeTiled(self, *_: Any) -> int:
        """Encoded."""
        return 0


def silence_driver() -> None:
    """Have kernels loaded and launched by nobody; after `record_kernels.imagine_gpu`."""
    import torch
    import triton

    from quire.kernels.triton.runtime import driver

    library = SilentLibrary()
    driver._library = lambda: library
    active = triton.runtime.driver.active
    numbers = iter(range(1, 1 << 30))
    active.utils.load_binary = lambda *_: (1, next(numbers), 3, 0, 1024)
    active.launcher_cls = driver.make_launcher

    def multiply(*_: Any, **__: Any) -> None: ...

    torch.mm = torch.addmm = torch.Tensor.addmm_ = multiply


def launches_of(step: Any) -> list[tuple[Any, ...]]:
    """(function, grid, packed arguments) of all that a step launches."""
    from quire.kernels.triton.runtime import driver

    found: list[tuple[Any, ...]] = []
    submit = driver.Launcher.submit

    def noting(self: Any, x: int, y: int, z: int, stream: int, function: int, values: Any) -> None:
        submit(self, x, y, z, stream, function, values)
        found.append((function, (x, y, z), bytes(self._parameters.buffer)[self._parameters.offset :]))

    driver.Launcher.submit = noting
    try:
        step()
    finally:
        driver.Launcher.submit = submit
    return found


def operators_of(step: Any) -> dict[str, int]:
    """How often a step calls each of torch's operators, views included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: collections.Counter[str] = collections.Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(function)] += 1
            return function(*args, **(kwargs or {}))

    with Count():
        step()
    return dict(counts.most_common())


def fastest(step: Any) -> float:
    """Milliseconds of this thread's processor: others' work on the machine counts less than on a clock."""
    best = float("inf")
    for _ in range(STEPS):
        begin = time.thread_time()
        step()
        best = min(best, time.thread_time() - begin)
    return 1e3 * best


def kernel_counts(step: Any) -> dict[str, int]:
    """How often each kernel is launched."""
    from triton.runtime.jit import JITFunction

    counts: collections.Counter[str] = collections.Counter()
    run = JITFunction.run

    def counting(kernel: Any, *args: Any, **named: Any) -> Any:
        counts[f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"] += 1
        return run(kernel, *args, **named)

    JITFunction.run = counting
    try:
        step()
    finally:
        JITFunction.run = run
    return dict(counts.most_common())


def main() -> int:
    """The table of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine argument")
    parser.add_argument("--profile", action="store_true", help="Python's functions by time, launched our way")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    args = parser.parse_args()
    memory = 140 * record_kernels.GIB
    record_kernels.imagine_gpu("NVIDIA H200", (9, 0), memory, 132, 227 << 10)
    silence_driver()

    from quire.engine.arg_utils import EngineArgs
    from quire.kernels.triton.runtime import direct_launch

    settings = {name: record_kernels._number(text) for name, text in (entry.split("=", 1) for entry in args.set)}
    given = EngineArgs(model=args.model, device="cuda", load_format="dummy", skip_tokenizer_init=True)
    config = dataclasses.replace(given, **settings).create_engine_config()
    runner = record_kernels.imagine_runner(config, memory, lambda launch_all: None)
    longest = args.tokens // args.requests
    shape = runner._graphs.mixed_shape(args.tokens, args.requests, args.requests, longest, True)
    shape = dataclasses.replace(shape, is_graph=False, max_query_len=longest, decodes=longest == 1)

    def step() -> None:
        runner._compute(shape)

    step()
    kernels, operators = kernel_counts(step), operators_of(step)
    theirs, their_ms = launches_of(step), fastest(step)
    if not direct_launch.install(lambda: 0, lambda device: 0):
        print("this Triton keeps its own launches: nothing to compare")
        return 1
    step()
    ours, our_ms = launches_of(step), fastest(step)
    is_same = ours == theirs
    figures = {
        "model": args.model,
        "tokens": args.tokens,
        "launches": len(theirs),
        "triton_ms": round(their_ms, 3),
        "direct_ms": round(our_ms, 3),
        "same_launches": is_same,
        "kernels": kernels,
        "torch_operators": operators,
    }
    print(json.dumps(figures, indent=2))
    if args.profile:
        with cProfile.Profile() as profile:
            for _ in range(5):
                step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
