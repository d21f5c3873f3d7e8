"""`quire bench plot`: figures of results over a setting, as SVG."""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from quire.benchmarks import plots
from quire.benchmarks.common import write_text
from quire.benchmarks.results import Row, is_number, names_of, read_rows
from quire.errors import ConfigError

USUAL_FIGURES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "output_tokens_per_second", "avg_latency")
"""What is drawn when nothing is named, as far as the results have it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is drawn."""
    parser.add_argument("results", nargs="+", help="result files or folders: JSON, JSON lines, a sweep's summary.json")
    add_axes(parser)
    parser.add_argument("--output", "-o", metavar="PATH", help="the file of a single figure (FIGURE.svg)")


def add_axes(parser: argparse.ArgumentParser) -> None:
    """Which keys are drawn."""
    parser.add_argument("--x", metavar="KEY", help="the setting along the axis; else the first number that varies")
    parser.add_argument("--y", nargs="+", metavar="KEY", help="figures, one chart each; else the usual ones")
    parser.add_argument("--curve-by", nargs="*", metavar="KEY", help="settings that make a curve each")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    """Draw, and tell where."""
    rows = [row for path in args.results for row in read_rows(path)]
    if args.output and len(args.y or ()) != 1:
        raise ConfigError.of("output", "one file holds one chart; name one figure with --y.")
    written = draw(rows, args.x, args.y, args.curve_by or [], lambda figure: args.output or f"{figure}.svg")
    return {"written": written}


def draw(
    rows: Sequence[Row], x: str | None, figures: Sequence[str] | None, curve_by: Sequence[str], path_of: Any
) -> list[str]:
    """Write a chart for each figure; the paths.

    Args:
        path_of: a figure's file.

    Raises:
        ConfigError: a key that no result has.
    """
    names = names_of(rows)
    x = x or first_varying(rows)
    chosen = list(figures or [name for name in USUAL_FIGURES if name in names])
    for name in (x, *chosen, *curve_by):
        if name not in names:
            raise ConfigError.of("plot", f"no result has {name!r}; there are {', '.join(names)}.")
    written: list[str] = []
    for figure in chosen:
        chart = plots.line_chart(curves_of(rows, x, figure, curve_by), f"{figure} over {x}", x, figure)
        path = path_of(figure)
        write_text(path, chart, "plot")
        print(f"Written to {path}")
        written.append(path)
    return written


def first_varying(rows: Sequence[Row]) -> str:
    """The first key with different numbers."""
    for name in names_of(rows):
        values = {row.get(name) for row in rows}
        if len(values) > 1 and all(is_number(value) for value in values):
            return name
    raise ConfigError.of("x", "no number differs between the results; name one with --x.")


def curves_of(rows: Sequence[Row], x: str, figure: str, curve_by: Sequence[str]) -> list[plots.Curve]:
    """Medians of the runs at each x, and how far these runs lie apart."""
    groups: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if is_number(row.get(x)) and is_number(row.get(figure)):
            name = ", ".join(f"{key}={row.get(key)}" for key in curve_by)
            groups.setdefault(name, {}).setdefault(row[x], []).append(row[figure])
    return [
        plots.Curve(
            name,
            [(at, statistics.median(values)) for at, values in sorted(points.items())],
            [(min(values), max(values)) for _, values in sorted(points.items())],
        )
        for name, points in groups.items()
    ]
