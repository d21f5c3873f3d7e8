"""`quire top`: a running server's queues, pages, tokens and slowest requests, in the terminal, again and again."""

import argparse
import collections
import contextlib
import json
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from quire.entrypoints.cli.server_watch import ServerWatch, figures
from quire.entrypoints.cli.terminal import BOLD, DIM, RESET, is_styled, printable
from quire.errors import ConfigError, QuireError

CLEAR, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 60
NONE = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and how to show it."""
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="the server (http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (or QUIRE_API_KEY)")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (2)")
    parser.add_argument("--once", action="store_true", help="print one view of one interval, and leave")
    parser.add_argument("--json", action="store_true", help="print each view as a line of JSON")


def run(args: argparse.Namespace) -> int:
    """Look until the user leaves (q or Ctrl-C)."""
    from quire import envs

    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"interval={args.interval} must be from 0.05 to 3600 seconds.", setting="interval")
    watch = ServerWatch(args.url, args.api_key or envs.QUIRE_API_KEY)
    before = watch.sample()
    if args.once or args.json or not sys.stdout.isatty():
        while True:
            time.sleep(args.interval)
            now = watch.sample()
            shown = figures(before, now)
            print(json.dumps(shown) if args.json else as_text(shown, watch.url, ()), flush=True)
            if args.once:
                return 0
            before = now
    with contextlib.suppress(KeyboardInterrupt), _screen():
        _show(watch, before, args.interval)
    return 0


def _show(watch: ServerWatch, before: Any, interval: float) -> None:
    rates: collections.deque[float] = collections.deque(maxlen=HISTORY)
    while not _wait_for_quit(interval):
        try:
            now = watch.sample()
        except QuireError as error:
            _draw(f"{error}\n\ntrying again every {interval:g} s; q leaves")
            continue
        shown = figures(before, now)
        rates.append(shown["generation_tokens_per_s"])
        _draw(as_text(shown, watch.url, rates, styled=is_styled(sys.stdout)))
        before = now


def _wait_for_quit(seconds: float) -> bool:
    """Wait; whether the user typed q."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """A screen of one's own, and keys without Enter; both are given back whatever happens."""
    import termios
    import tty

    kept = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    if kept is not None:
        tty.setcbreak(sys.stdin)
    sys.stdout.write(ENTER)
    sys.stdout.flush()
    try:
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        if kept is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)


def _draw(text: str) -> None:
    """The screen's content, as much as fits; a line too long is cut."""
    width, height = shutil.get_terminal_size()
    lines = [cut(line, width) for line in text.split("\n")[: height - 1]]
    sys.stdout.write(CLEAR + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_REST)
    sys.stdout.flush()


def cut(line: str, width: int) -> str:
    """A line's first `width` columns, styles not counted."""
    if "\x1b" not in line:
        return line[:width]
    pieces, used = [], 0
    for index, piece in enumerate(line.split("\x1b[")):
        style, text = ("", piece) if index == 0 else (f"\x1b[{piece.partition('m')[0]}m", piece.partition("m")[2])
        pieces.append(style + text[: max(0, width - used)])
        used += len(text)
    return "".join(pieces)


def as_text(shown: dict[str, Any], url: str, rates: Sequence[float], *, styled: bool = False) -> str:
    """The view: a headline, figures, and the requests that take longest."""

    def style(code: str, text: str) -> str:
        return f"{code}{text}{RESET}" if styled else text

    head = [f"{shown['model']} at {url}"]
    if shown["version"]:
        head.append(f"version {shown['version']}")
    if shown["uptime_s"] is not None:
        head.append(f"up {_clock(shown['uptime_s'])}")
    pages, free = shown["num_pages"], shown["free_pages"]
    usage = shown["kv_usage"]
    of = f"  {pages - free:,} of {pages:,}" if pages is not None and free is not None else ""
    hits, ever = _share(shown["prefix_hit_share"]), _share(shown["prefix_hit_share_ever"])
    ends = ", ".join(f"{reason} {rate:g}/s" for reason, rate in shown["finished_per_s"].items() if rate)
    step = f"{_number(shown['step_ms'], 'ms')}  predicted {_number(shown['step_predicted_ms'], 'ms')}"
    rows = [
        ("requests", f"{shown['running']} running  {shown['waiting']} waiting  {shown['preemptions']} preempted"),
        ("finished", ends or NONE),
        ("KV pages", f"{_bar(usage or 0.0)} {_share(usage)}{of}"),
        (
            "tokens/s",
            f"{shown['generation_tokens_per_s']:,.0f} generated  {shown['prompt_tokens_per_s']:,.0f} of prompts  {spark(rates)}",
        ),
        ("prefix hits", f"{hits} now  {ever} ever"),
        ("step", f"{step}  {_number(shown['step_tokens'], 'tokens')}  {shown['steps_per_s']:g} a second"),
        (
            "latency",
            f"first token {_seconds(shown['first_token_s'])}  between tokens {_seconds(shown['inter_token_s'])}"
            f"  whole {_seconds(shown['request_s'])}",
        ),
    ]
    lines = [style(BOLD, "  ".join(head)), "", *(f"{style(DIM, f'{name:<12}')}{text}" for name, text in rows)]
    for title, name in (("running, longest first", "requests"), ("finished, slowest of the last", "finished")):
        if shown[name]:
            lines += ["", style(BOLD, f"{title}:"), style(DIM, _TABLE_HEAD), *map(_request_row, shown[name][:12])]
    return "\n".join(lines)


_COLUMNS = (("prompt", 8), ("cached", 8), ("output", 7), ("tokens/s", 9), ("queued", 8), ("first", 8), ("total", 8))
_TABLE_HEAD = f"{'request':<44} {'state':<10} " + " ".join(f"{name:>{width}}" for name, width in _COLUMNS)


def _request_row(request: dict[str, Any]) -> str:
    reason = request.get("reason") or request.get("state", "")
    return (
        f"{printable(request.get('id', ''))[:44]:<44} {reason:<10} {request.get('prompt_tokens', 0):>8,}"
        f" {request.get('cached_tokens', 0):>8,} {request.get('output_tokens', 0):>7,}"
        f" {request.get('tokens_per_second', 0.0):>9,.1f} {_seconds(request.get('queued_s')):>8}"
        f" {_seconds(request.get('first_token_s')):>8} {_seconds(request.get('total_s')):>8}"
    )


def spark(values: Sequence[float]) -> str:
    """Values as bars of eight heights; the largest is full."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    return "".join(BARS[0 if value <= 0 else max(1, round(8 * value / most))] for value in values)


def _bar(share: float, width: int = 30) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def _share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, unit: str) -> str:
    return f"{NONE} {unit}" if value is None else f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.1f} s" if value < 600 else _clock(value)


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
