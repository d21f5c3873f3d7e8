"""`quire bench plot`: figures of results over a setting, as SVG that any browser shows; and the timeline of a load."""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from quire.benchmarks.common import write_text
from quire.benchmarks.results import Row, is_number, names_of, read_rows
from quire.engine.arg_parser import Flags, add_flags
from quire.errors import ConfigError

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 44, 56
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#666666")
"""Told apart by colour-blind eyes too (Okabe and Ito's, the last two ours)."""
MAX_BARS = 2000
"""Rows of a timeline; of more requests every n-th is drawn."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points with a name, drawn in the order of x.

    Attributes:
        spread: how far each point's repetitions lie, lowest and highest; empty for single runs.
    """

    name: str
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float]] = ()


def nice_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from `low` or below to `high` or above."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def number_text(value: float) -> str:
    """A tick's label: short, with k, M and G for thousands, millions and billions."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[suffix]:.6g}{suffix}"
    return f"{value:.6g}"


class _Canvas:
    """An SVG under way, with axes from ticks.

    Args:
        x_ticks, y_ticks: ascending; their ends are the axes' ends.
    """

    def __init__(self, title: str, x_label: str, y_label: str, x_ticks: list[float], y_ticks: list[float]) -> None:
        self._x, self._y = x_ticks, y_ticks
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        ]
        self.text(LEFT, 24, title, size=15)
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_label, "middle")
        middle = (TOP + HEIGHT - BOTTOM) / 2
        self.parts.append(
            f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{escape(y_label)}</text>'
        )
        for tick in x_ticks:
            self.line(self.x(tick), TOP, self.x(tick), HEIGHT - BOTTOM, "#e4e4e4")
            self.text(self.x(tick), HEIGHT - BOTTOM + 18, number_text(tick), "middle")
        for tick in y_ticks:
            self.line(LEFT, self.y(tick), WIDTH - RIGHT, self.y(tick), "#e4e4e4")
            self.text(LEFT - 8, self.y(tick) + 4, number_text(tick), "end")

    def x(self, value: float) -> float:
        share = (value - self._x[0]) / (self._x[-1] - self._x[0])
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 2)

    def y(self, value: float) -> float:
        share = (value - self._y[0]) / (self._y[-1] - self._y[0])
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 2)

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> None:
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> None:
        self.parts.append(f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{colour}" stroke-width="{width}"/>')

    def legend(self, names: Sequence[str], colours: Sequence[str]) -> None:
        """Names beside the title, or one below another where they do not fit there."""
        widths = [32 + 7.5 * len(name) for name in names]
        fits = sum(widths) < (WIDTH - LEFT) * 0.6
        x, y = (WIDTH - RIGHT - sum(widths), TOP - 16) if fits else (LEFT + 12, TOP + 10)
        for name, colour, width in zip(names, colours, widths, strict=True):
            self.parts.append(f'<rect x="{x}" y="{y}" width="12" height="8" fill="{colour}"/>')
            self.text(x + 16, y + 8, name)
            x, y = (x + width, y) if fits else (x, y + 16)

    def finish(self) -> str:
        return "\n".join((*self.parts, "</svg>", ""))


def line_chart(curves: Sequence[Curve], title: str, x_label: str, y_label: str) -> str:
    """Curves over one axis; the y axis starts at 0 unless values are below it."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points] + [
        y for curve in curves for pair in curve.spread for y in pair
    ]
    if not xs:
        raise ConfigError.of("plot", "there is no result with both of the keys that are to be drawn.")
    canvas = _Canvas(title, x_label, y_label, nice_ticks(min(xs), max(xs)), nice_ticks(min(0.0, *ys), max(ys)))
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        order = sorted(range(len(curve.points)), key=lambda index: curve.points[index])
        places = [(canvas.x(curve.points[index][0]), canvas.y(curve.points[index][1])) for index in order]
        path = "L".join(f"{x} {y}" for x, y in places)
        canvas.parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for index, (x, y) in zip(order, places, strict=True):
            if curve.spread:
                canvas.line(x, canvas.y(curve.spread[index][0]), x, canvas.y(curve.spread[index][1]), colour)
            label = f"{curve.name}: {curve.points[index][0]:g}, {curve.points[index][1]:g}".lstrip(": ")
            canvas.parts.append(
                f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"><title>{escape(label)}</title></circle>'
            )
    if len(curves) > 1 or curves[0].name:
        canvas.legend(
            [curve.name for curve in curves], [COLOURS[number % len(COLOURS)] for number in range(len(curves))]
        )
    return canvas.finish()


def timeline(details: Mapping[str, Sequence[Any]], duration: float) -> str:
    """Each request as a bar over time: waiting for its first token, generating, or failed. `details`: `start_times`, `ttfts`,
    `e2els` and `errors` of a result that was saved with them; seconds."""
    count = len(details["start_times"])
    every = -(-count // MAX_BARS)
    rows = range(0, count, every)
    canvas = _Canvas(
        f"{count} requests" + (f", every {every}th" if every > 1 else ""),
        "seconds",
        "request",
        nice_ticks(0.0, duration),
        nice_ticks(0.0, float(count)),
    )
    thick = max(0.4, abs(canvas.y(every) - canvas.y(0)) * 0.8)
    waiting, generating, failed = "#e69f00", "#0072b2", "#d55e00"
    for row in rows:
        start, y = details["start_times"][row], canvas.y(row + 0.5)
        if details["errors"][row]:
            canvas.parts.append(f'<circle cx="{canvas.x(start)}" cy="{y}" r="3" fill="{failed}"/>')
            continue
        first, end = canvas.x(start + details["ttfts"][row]), canvas.x(start + details["e2els"][row])
        canvas.line(canvas.x(start), y, first, y, waiting, thick)
        canvas.line(first, y, end, y, generating, thick)
    canvas.legend(("to the first token", "generating", "failed"), (waiting, generating, failed))
    return canvas.finish()


USUAL_FIGURES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "output_tokens_per_second", "avg_latency")
"""What is drawn when nothing is named, as far as the results have it."""


AXES: Flags = (
    ("--x", None, "the setting along the axis; else the first number that varies", {"metavar": "KEY"}),
    ("--y", None, "figures, one chart each; else the usual ones", {"nargs": "+", "metavar": "KEY"}),
    ("--curve-by", None, "settings that make a curve each", {"nargs": "*", "metavar": "KEY"}),
)
"""Which keys are plotted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", help="result files or folders: JSON, JSON lines, a sweep's summary.json")
    output = ("--output -o", None, "the file of a single figure (FIGURE.svg)", {"metavar": "PATH"})
    add_flags(parser, {"": (*AXES, output)})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    rows = [row for path in args.results for row in read_rows(path)]
    if args.output and len(args.y or ()) != 1:
        raise ConfigError.of("output", "one file holds one chart; name one figure with --y.")
    written = plot_figures(rows, args.x, args.y, args.curve_by or [], lambda figure: args.output or f"{figure}.svg")
    return {"written": written}


def plot_figures(
    rows: Sequence[Row], x: str | None, figures: Sequence[str] | None, curve_by: Sequence[str], path_of: Any
) -> list[str]:
    """Write a chart for each figure; the paths. `path_of`: a figure's file.
    Raises ConfigError: a key that no result has."""
    names = names_of(rows)
    x = x or first_varying(rows)
    chosen = list(figures or [name for name in USUAL_FIGURES if name in names])
    for name in (x, *chosen, *curve_by):
        if name not in names:
            raise ConfigError.of("plot", f"no result has {name!r}; there are {', '.join(names)}.")
    written: list[str] = []
    for figure in chosen:
        chart = line_chart(curves_of(rows, x, figure, curve_by), f"{figure} over {x}", x, figure)
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


def curves_of(rows: Sequence[Row], x: str, figure: str, curve_by: Sequence[str]) -> list[Curve]:
    """Medians of the runs at each x, and how far these runs lie apart."""
    groups: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if is_number(row.get(x)) and is_number(row.get(figure)):
            name = ", ".join(f"{key}={row.get(key)}" for key in curve_by)
            groups.setdefault(name, {}).setdefault(row[x], []).append(row[figure])
    return [
        Curve(
            name,
            [(at, statistics.median(values)) for at, values in sorted(points.items())],
            [(min(values), max(values)) for _, values in sorted(points.items())],
        )
        for name, points in groups.items()
    ]
