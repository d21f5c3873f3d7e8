"""What the benchmarks share: prompts from a seed, percentiles, tables, progress, the machine's description.

Knows numbers and text. Knows nothing of engines.
"""

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from quire.engine.arg_parser import Flags, add_flags
from quire.errors import refusing

ItemT = TypeVar("ItemT")

LOWEST_TOKEN = 10
"""Random prompts leave out the first ids, where special tokens tend to be."""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, with which `load_engine` makes it."""
    from quire.engine.arg_utils import EngineArgs

    EngineArgs.add_cli_args(parser)


def with_engine(groups: Mapping[str, Flags]) -> Callable[[argparse.ArgumentParser], None]:
    """`add_arguments` of a benchmark that makes an engine: its own flags, and the engine's."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_flags(parser, groups)
        add_engine_arguments(parser)

    return add_arguments


def load_engine(args: argparse.Namespace) -> Any:
    """The offline engine that the flags describe."""
    from quire import LLM
    from quire.engine.arg_utils import EngineArgs

    return LLM.from_engine_args(EngineArgs.from_cli_args(args))


def random_tokens(source: random.Random, count: int, vocab_size: int) -> list[int]:
    """Token ids of a vocabulary, its special tokens left out."""
    high = max(LOWEST_TOKEN + 1, vocab_size - LOWEST_TOKEN)
    return source.choices(range(LOWEST_TOKEN, high), k=count)


def random_prompts(
    count: int, lengths: Sequence[int], vocab_size: int, seed: int, prefix_len: int = 0
) -> list[list[int]]:
    """Prompts of random tokens; no two are alike beyond the shared prefix."""
    source = random.Random(seed)
    prefix = random_tokens(source, prefix_len, vocab_size)
    return [
        prefix[: max(0, length - 1)] + random_tokens(source, max(1, length - prefix_len), vocab_size)
        for length in lengths[:count]
    ]


def model_name(model: str) -> str:
    """What figures call a model: a hub id as it is, a folder by its last part, so that no machine's paths are kept."""
    return os.path.basename(model.rstrip("/")) if os.path.isdir(model) else model


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 100) per cent lie, interpolated; 0 for no values."""
    return float(np.percentile(values, share)) if values else 0.0


def summary(values: Sequence[float], shares: Iterable[float] = (50, 90, 99)) -> dict[str, float]:
    """Mean, smallest, largest and percentiles."""
    if not values:
        return {}
    figures = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    return figures | {f"p{share:g}": percentile(values, share) for share in shares}


def print_table(title: str, rows: Sequence[tuple[str, Any]]) -> None:
    """Names and values in two columns."""
    print_columns(title, ("figure", "value"), rows)


def print_columns(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    texts = [[f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *texts]) for column in range(len(header))]
    print(f"\n{title}")
    for line in [list(header), ["-" * width for width in widths], *texts]:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells))
    print(flush=True)


def print_summaries(title: str, summaries: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> None:
    """A table of what `summary` gives, a row each."""
    rows = [[name, *(figures.get(column, 0.0) for column in columns)] for name, figures in summaries.items()]
    print_columns(title, ("", *columns), rows)


def progress(items: Iterable[ItemT], total: int, what: str) -> Iterator[ItemT]:
    """The items, with a line on standard error now and then that says how far it has come."""
    began = last = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last > 2.0 or (number == total and now - began > 2.0):
            last = now
            print(f"{what}: {number} of {total} ({now - began:.0f} s)", file=sys.stderr, flush=True)


def write_text(path: str, text: str, setting: str, mode: str = "w") -> None:
    """Keep a result, in a folder that is made where it is missing. `setting`: the flag that named the file.
    Raises ConfigError: it cannot be written."""
    with refusing(OSError, setting=setting, what=f"{setting}: cannot write {path!r}"):
        if os.path.dirname(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)


def check_folder(path: str, setting: str) -> None:
    """Make a folder for results where it is missing. Raises ConfigError: nothing can be written there."""
    with refusing(OSError, setting=setting, what=f"{setting}: cannot write in {path!r}"):
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


def processor() -> str:
    """What this machine's processor calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("model name", "Model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": processor(), "cores": cores, "python": platform.python_version(), "system": platform.system()}
