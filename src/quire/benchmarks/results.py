"""Result files of benchmarks, read again: their figures by name, which way is better, and repetitions put together.

Knows JSON and names of figures. Knows nothing of how they were measured.
"""

import json
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.errors import ConfigError, refusing

Row = dict[str, Any]
"""One result, flat: `batch_seconds.p50` is a key of a nested one."""

NOT_FIGURES = ("machine", "client", "runs", "goodput_slo")
HIGHER_IS_BETTER = re.compile(r"throughput|per_second|per_s$|tokens_per_|goodput|accuracy|completed")
LOWER_IS_BETTER = re.compile(r"(_ms|_us|_s|seconds)$|latency|duration|elapsed|_rss_|failed")
NEITHER = re.compile(r"^std_|request_rate|timeout|max_step_ms|_rps$")


def flatten(figures: Mapping[str, Any], prefix: str = "") -> Row:
    """Numbers, texts and truths of a result, without lists and without what tells of the machine."""
    row: Row = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            if name not in NOT_FIGURES:
                row |= flatten(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, int | float | str):
            row[prefix + name] = value
    return row


def direction(name: str) -> int:
    """1 for a figure that is better when it is higher, -1 when it is lower, 0 for what is not a figure.

    The last part of a nested name that says it decides: `batch_seconds.p50` is better as `batch_seconds` is.
    """
    for part in reversed(name.split(".")):
        if NEITHER.search(part):
            return 0
        if HIGHER_IS_BETTER.search(part):
            return 1
        if LOWER_IS_BETTER.search(part):
            return -1
    return 0


def read_rows(path: str) -> list[Row]:
    """Every result in a file (one JSON object, a list of them, or one a line) or in a folder of such files.
    Raises ConfigError: there is none, or a file is not JSON."""
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.endswith((".json", ".jsonl")))
        rows = [row for name in names for row in read_rows(os.path.join(path, name))]
    else:
        rows = [flatten(result) for result in _read_results(path)]
    if not rows:
        raise ConfigError.of("results", f"{path!r} has no result of a benchmark.")
    return rows


def _read_results(path: str) -> list[Mapping[str, Any]]:
    with refusing(OSError, ValueError, setting="results", what=f"results: cannot read {path!r} as JSON"):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            found: Any = json.loads(text)
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    results = found if isinstance(found, list) else [found]
    if not all(isinstance(result, Mapping) for result in results):
        raise ConfigError.of("results", f"{path!r} holds something else than results of benchmarks.")
    return results


def is_number(value: Any) -> bool:
    """Whether a value can be measured; a truth cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def column(rows: Sequence[Row], name: str) -> list[float]:
    """The numbers under a name."""
    return [row[name] for row in rows if is_number(row.get(name))]


def spread(values: Sequence[float]) -> float:
    """How far apart repetitions lie, as a share of their median; 0 of a single one."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / abs(middle) if middle else 0.0


def names_of(rows: Iterable[Row]) -> list[str]:
    """Every key, in the order of its first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))
