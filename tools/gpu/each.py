"""Checks of many architectures on one device, shared out to a few processes: one that fails ends no other."""

import concurrent.futures
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from typing import Any

WORKERS = 6


def _run(function: Callable[..., float], job: Sequence[Any]) -> tuple[float, str]:
    try:
        return function(*job), ""
    except Exception as error:  # whatever it is, the others go on; a device that is spoilt says so in each
        first: BaseException = error
        while first.__cause__ or first.__context__:
            first = first.__cause__ or first.__context__ or first
        where = "".join(traceback.format_tb(first.__traceback__)[-6:])
        return float("inf"), f"{type(error).__name__}: {error}\n{type(first).__name__}: {first}\n{where}"


def differences(function: Callable[..., float], jobs: Sequence[Sequence[Any]], tolerance: float) -> dict[str, float]:
    """What a script's function gives for each job, by the job's words; prints it. Of one that fails: infinity, and the error."""
    found: dict[str, float] = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        futures = [pool.submit(_run, function, job) for job in jobs]
        for job, future in zip(jobs, futures, strict=True):
            name = " ".join(str(word) for word in job)
            found[name], error = future.result()
            verdict = "ok" if found[name] < tolerance else "FAILED"
            print(f"{name:<60} {found[name]:.1e} {verdict} {error}".rstrip(), flush=True)
    return found
