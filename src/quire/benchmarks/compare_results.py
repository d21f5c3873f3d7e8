"""`quire bench compare-results`: two results of the same work, figure by figure, with a margin for noise.

Either side may be several runs (a folder, or a file with several results): then medians are compared, and the margin is at
least as wide as the runs of a side lie apart.
"""

import argparse
import statistics
from typing import Any

from quire.benchmarks import common
from quire.benchmarks.results import Row, column, direction, names_of, read_rows, spread
from quire.engine.arg_parser import only

THE_WORK = (
    *("benchmark", "dataset_name", "seed", "num_prompts", "num_requests", "num_streams", "batch_size", "dtype"),
    *("input_len", "output_len", "input_tokens", "total_input_tokens", "output_tokens", "total_output_tokens"),
    *("request_rate", "burstiness", "burst_size", "max_concurrency", "ramp_up_strategy", "num_clients"),
)
"""What must be equal for figures to be comparable."""


add_arguments = only(
    ("base", None, "a result (JSON), several (JSON lines, a list), or a folder of them"),
    ("new", None, "what is compared with it"),
    ("--margin", 3.0, "differences below this many per cent are noise"),
    ("--metrics", None, "only figures whose names contain one of these", {"nargs": "+", "metavar": "NAME"}),
    ("--fail-if-worse", False, "exit code 1 if a figure is worse"),
)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    base, new = read_rows(args.base), read_rows(args.new)
    rows = compare(base, new, args.margin / 100)
    if args.metrics:
        rows = [row for row in rows if any(part in row["figure"] for part in args.metrics)]
    table = [
        [row["figure"], row["base"], row["new"], f"{row['change']:+.1%}", f"{row['noise']:.1%}", row["verdict"]]
        for row in rows
    ]
    title = f"{args.new} against {args.base} ({len(new)} and {len(base)} runs, medians)"
    common.print_columns(title, ("figure", "base", "new", "change", "noise", "verdict"), table)
    different = different_work(base, new)
    for name, (before, after) in different.items():
        print(f"Not the same work: {name} is {before!r} in base and {after!r} in new.")
    num_worse = sum(row["verdict"] == "worse" for row in rows)
    return {
        "figures": rows,
        "different_work": {name: list(values) for name, values in different.items()},
        "exit_code": int(args.fail_if_worse and num_worse > 0),
    }


def compare(base: list[Row], new: list[Row], margin: float) -> list[dict[str, Any]]:
    """Every figure that both sides have: medians, their relative change, the noise, and what it means. `margin`: the least
    that counts as a difference, as a share."""
    compared: list[dict[str, Any]] = []
    for name in names_of(base):
        before, after = column(base, name), column(new, name)
        sign = direction(name)
        if not sign or not before or not after:
            continue
        old, now = statistics.median(before), statistics.median(after)
        if old == now == 0:
            continue
        change = (now - old) / abs(old) if old else float(now > 0) - float(now < 0)
        noise = max(margin, spread(before), spread(after))
        verdict = "same" if abs(change) <= noise else ("better" if change * sign > 0 else "worse")
        compared.append(
            {
                "figure": name,
                "base": float(old),
                "new": float(now),
                "change": change,
                "noise": noise,
                "verdict": verdict,
            }
        )
    return compared


def different_work(base: list[Row], new: list[Row]) -> dict[str, tuple[Any, Any]]:
    """What was measured on the sides, where it differs: both values, or both lists of them."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in THE_WORK:
        before, after = ({row.get(name) for row in rows} for rows in (base, new))
        if before != after:
            found[name] = (_one_or_all(before), _one_or_all(after))
    return found


def _one_or_all(values: set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else sorted(values, key=str)
