"""Every kernel of the GPU beside its plain PyTorch reference, on drawn shapes: the first section of `gpu_check.py`.

The files `gpu_cases_*.py` draw; this one runs and compares, each draw in a process of its own, some at a time: most of the time
goes to compiling. What a kernel does to its process (an illegal access, say) is that draw's failure alone.
"""

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

import torch
from tests.kernels.triton.decode_batches import make_batch
from tools.gpu_cases import Case, draw_case, draws, error_of, moved, rounds_of

from quire.kernels import ops, registry, triton
from quire.platforms.host import usable_cpus
from tools import gpu_cases_codes, gpu_cases_experts, gpu_cases_pages, gpu_cases_rows, gpu_cases_sampling

THREADS = 2
"""Of a process: references are computed on the CPU."""
MAX_PROCESSES = 12
PATIENCE_S = 240.0
"""From a draw's begin; then its process is ended."""
PAGE_TABLES = "page tables by request"
"""Checked like a draw; what attention libraries read in place of rows."""
DRAWN_IN = (gpu_cases_codes, gpu_cases_experts, gpu_cases_pages, gpu_cases_rows, gpu_cases_sampling)
"""Those with the most to compile first."""


class Line(NamedTuple):
    """The verdict on one implementation."""

    label: str
    passed: bool
    detail: str
    seconds: float


def all_names() -> list[str]:
    """What there is to check, in the order of the report."""
    places = [module.__name__ for module in DRAWN_IN]
    return [*sorted(draws, key=lambda name: places.index(draws[name].__module__)), PAGE_TABLES]


def select_kernels(device: str) -> None:
    """The CUDA platform's kernels: on a GPU, or on a CPU in Triton's interpreter."""
    if device == "cpu":
        triton.register()
        ops.select("cuda")
        return
    from quire.kernels.triton.runtime import door
    from quire.platforms.cuda import CudaPlatform

    door.install_driver()
    CudaPlatform().select_kernels()


def check_draw(
    name: str,
    device: str,
    rounds: Sequence[int] | None = None,
    seed: int = 0,
    *,
    is_small: bool = False,
    slack: float = 1.0,
) -> list[Line]:
    """A verdict on every implementation of a draw's operation that the platform has. Each runs twice: what was launched before is
    launched another way (`direct_launch`).

    Args:
        rounds: numbers of the cases, if not as many as the draw asks for.
        slack: what the errors that are allowed are multiplied with.
    """
    if name == PAGE_TABLES:
        return [_check_page_tables(device)]
    rounds = range(rounds_of[name]) if rounds is None else rounds
    kernels = registry.implementations(name.partition(",")[0])
    reference = next(entry.function for entry in kernels if entry.platform == "any")
    entries = [entry for entry in kernels if entry.platform == "cuda" and entry.unavailable() is None]
    worst: list[tuple[float, str]] = [(0.0, "")] * len(entries)
    failures, seconds = [""] * len(entries), [0.0] * len(entries)
    for number in rounds:
        case = draw_case(name, number, seed, is_small=is_small)
        plain = case.arguments if case.plain is None else case.plain
        expected = [moved(argument, "cpu", None if case.exact else case.dtype) for argument in plain]
        (case.reference or reference)(*expected)
        for place, entry in enumerate(entries):
            begin = time.perf_counter()
            try:
                error = _largest_error(case, entry.function, expected, device)
            except Exception as exception:
                traceback.print_exc()
                error, why = float("inf"), f": {type(exception).__name__}: {exception}"[:160]
            else:
                why = f" off by {error:.1e}, allowed is {case.limit() * slack:.1e}"
            if not error <= case.limit() * slack:
                failures[place] = failures[place] or f"case {number}{why}"
            worst[place] = max(worst[place], (error, str(case.dtype).removeprefix("torch.")))
            seconds[place] += time.perf_counter() - begin
    return [
        Line(
            _label(name, entry, is_alone=len(entries) == 1),
            not failures[place],
            failures[place] or f"worst {worst[place][0]:.1e} {worst[place][1]}, {len(rounds)} cases",
            seconds[place],
        )
        for place, entry in enumerate(entries)
    ]


def _label(name: str, entry: registry.Kernel, *, is_alone: bool) -> str:
    """Of several implementations one is for batches of any form."""
    function = f"{entry.function.__module__.rpartition('.')[2]}.{entry.function.__qualname__}"
    return f"{name} ({function}{', invariant' if entry.invariant and not is_alone else ''})"


def _largest_error(case: Case, function: Any, expected: list[Any], device: str) -> float:
    errors: list[float] = []
    for _ in range(2):
        ours = [moved(argument, device, None) for argument in case.arguments]
        with case.within():
            function(*ours)
        errors += [error_of(case, ours[index], expected[index]) for index in case.outputs]
    return max(errors)


def _check_page_tables(device: str) -> Line:
    from quire.kernels.triton.attention.page_tables import gather_tables

    begin = time.perf_counter()
    metadata = moved(make_batch([3000, 16, 17, 1, 900], padding=2).metadata, device, None)
    tables_BP = torch.full((7, metadata.block_table.shape[1]), -7, dtype=torch.int32, device=device)
    lens_B = torch.zeros(7, dtype=torch.int32, device=device)
    gather_tables(metadata, tables_BP, lens_B)
    expected_BP = metadata.block_table[metadata.rows.long()]
    pages_P, counts_B = torch.arange(tables_BP.shape[1], device=device), (lens_B + 15) // 16
    is_used_BP = pages_P < counts_B[:, None]
    passed = torch.equal(lens_B, metadata.seq_lens.clamp(min=1))
    passed &= bool((tables_BP == expected_BP)[is_used_BP].all() and (tables_BP == -7)[~is_used_BP].all())
    return Line(PAGE_TABLES, passed, "7 requests", time.perf_counter() - begin)


def _work(answer: Connection, name: str, device: str, rounds: Sequence[int] | None, is_small: bool) -> None:
    """In a process of its own: one draw's lines, as JSON."""
    torch.set_num_threads(THREADS)
    select_kernels(device)
    answer.send_bytes(json.dumps(check_draw(name, device, rounds, is_small=is_small)).encode())


def check_kernels(
    device: str = "cuda",
    names: Sequence[str] | None = None,
    *,
    rounds: Sequence[int] | None = None,
    is_small: bool = False,
    processes: int = 0,
) -> Iterator[Line]:
    """The lines of all draws, or of those that are named, in order.

    Args:
        device: "cpu" for Triton's interpreter.
        processes: at a time; half of the processors where none is said.
    """
    # Children are forked from a server that has imported what takes long, and has neither threads nor a device's context.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", __name__])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path)):
        forkserver.ensure_running()

    def check(name: str) -> list[Line]:
        begin = time.perf_counter()
        answer, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, name, device, rounds, is_small), daemon=True)
        process.start()
        theirs.close()
        try:
            if answer.poll(PATIENCE_S):
                return [Line(*line) for line in json.loads(answer.recv_bytes())]
            process.kill()
            why = f"no verdict in {PATIENCE_S:.0f} s"
        except EOFError:
            process.join()
            why = f"its process ended with {process.exitcode}"
        finally:
            answer.close()
        return [Line(name, False, why, time.perf_counter() - begin)]

    wanted = all_names() if names is None else names
    with ThreadPoolExecutor(processes or max(1, min(MAX_PROCESSES, usable_cpus() // 2))) as threads:
        for lines in threads.map(check, wanted):
            yield from lines
