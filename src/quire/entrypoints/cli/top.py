"""`quire top`: a running server's queues, pages, tokens and slowest requests, in the terminal, again and again."""

import argparse
import collections
import contextlib
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from quire.descriptors import wait_readable
from quire.entrypoints.cli.http_client import OpenAIClient
from quire.entrypoints.cli.terminal import BOLD, DIM, RESET, is_styled, printable
from quire.errors import ConfigError, EngineError, QuireError, RequestError

TIMEOUT_S = 10.0
PREFIXES = ("quire:", "vllm:")
GAUGES = {"running": "num_requests_running", "waiting": "num_requests_waiting", "kv_usage": "kv_cache_usage_perc"}
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
    "preemptions": "num_preemptions_total",
    "steps": "engine_steps_total",
}
MEANS = {
    "first_token_s": "time_to_first_token_seconds",
    "inter_token_s": "inter_token_latency_seconds",
    "request_s": "e2e_request_latency_seconds",
}
FINISHED = "request_success_total"


@dataclasses.dataclass
class Sample:
    """A server's figures at one moment. Counters are since its start."""

    at: float
    model: str = ""
    values: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    sums: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    finished: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    state: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


class ServerWatch:
    """Takes samples of the server at `url`.

    Raises:
        ConfigError: nobody answers there.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = OpenAIClient(self.url, api_key, base="", timeout_s=TIMEOUT_S)
        self._has_state = True

    def sample(self) -> Sample:
        """The figures now. Raises QuireError: the server cannot be reached, or gives none."""
        sample = read_metrics(self._client.get("/metrics").decode("utf-8", "replace"), time.monotonic())
        if self._has_state:
            try:
                sample.state = json.loads(self._client.get("/console/state"))
            except (RequestError, EngineError):
                self._has_state = False  # another server, or one that tells less
            except (QuireError, ValueError):
                pass
        return sample


def read_metrics(text: str, at: float) -> Sample:
    """A sample of Prometheus' text; engines of one server are added up, their cache use is the mean.
    Raises EngineError: it has none of the figures."""
    from prometheus_client.parser import text_string_to_metric_families

    sample = Sample(at)
    totals: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            prefix = next((prefix for prefix in PREFIXES if family.name.startswith(prefix)), None)
            if prefix is None:
                continue
            for each in family.samples:
                name = each.name.removeprefix(prefix)
                sample.model = sample.model or each.labels.get("model_name", "")
                if name == FINISHED:
                    reason = each.labels.get("finished_reason", "?")
                    sample.finished[reason] = sample.finished.get(reason, 0.0) + each.value
                elif not name.endswith("_bucket"):
                    totals.setdefault(name, []).append(each.value)
    except ValueError as error:
        raise EngineError(f"what /metrics gives cannot be read: {error}") from None
    if not totals:
        raise EngineError("what /metrics gives has none of the figures of Quire or vLLM")
    for ours, name in {**GAUGES, **COUNTERS}.items():
        if name in totals:
            sample.values[ours] = sum(totals[name])
    if "kv_usage" in sample.values:
        sample.values["kv_usage"] /= len(totals[GAUGES["kv_usage"]])
    for ours, name in MEANS.items():
        if f"{name}_count" in totals:
            sample.sums[ours] = (sum(totals[f"{name}_sum"]), sum(totals[f"{name}_count"]))
    return sample


def figures(before: Sample, now: Sample) -> dict[str, Any]:
    """What happened between two samples, for people and scripts: rates a second, means in seconds, shares from 0 to 1.

    None stands where nothing happened or the server does not tell.
    """
    seconds = max(now.at - before.at, 1e-9)

    def grown(name: str) -> float:
        return max(0.0, now.values.get(name, 0.0) - before.values.get(name, 0.0))

    def mean(name: str) -> float | None:
        total, count = now.sums.get(name, (0.0, 0.0))
        past_total, past_count = before.sums.get(name, (0.0, 0.0))
        return (total - past_total) / (count - past_count) if count > past_count else None

    def ratio(part: float, whole: float) -> float | None:
        return part / whole if whole > 0 else None

    state = now.state
    step = state.get("step") or {}
    seen = {entry["id"] for entry in before.state.get("steps", ())}
    steps = [entry for entry in state.get("steps", ()) if entry["id"] not in seen]
    finished = {reason: count - before.finished.get(reason, 0.0) for reason, count in now.finished.items()}
    return {
        "model": state.get("model") or now.model,
        "version": state.get("version"),
        "uptime_s": state.get("uptime_s"),
        "running": int(now.values.get("running", 0)),
        "waiting": int(now.values.get("waiting", 0)),
        "kv_usage": now.values.get("kv_usage"),
        "num_pages": state.get("num_pages"),
        "free_pages": state.get("free_pages"),
        "generation_tokens_per_s": round(grown("generation_tokens") / seconds, 2),
        "prompt_tokens_per_s": round(grown("prompt_tokens") / seconds, 2),
        "prefix_hit_share": ratio(grown("prefix_hits"), grown("prefix_queries")),
        "prefix_hit_share_ever": ratio(now.values.get("prefix_hits", 0.0), now.values.get("prefix_queries", 0.0)),
        "steps_per_s": round(grown("steps") / seconds, 2),
        "step_ms": _mean_of(steps, "ms"),
        "step_predicted_ms": _mean_of(steps, "predicted_ms"),
        "step_tokens": _mean_of(steps, "num_tokens"),
        "last_step_ms": step.get("ms"),
        **{name: mean(name) for name in MEANS},
        "finished_per_s": {reason: round(count / seconds, 2) for reason, count in finished.items()},
        "preemptions": int(grown("preemptions")),
        "requests": slowest(state.get("requests", ())),
        "finished": slowest(state.get("finished", ())),
    }


def _mean_of(entries: list[dict[str, Any]], name: str) -> float | None:
    values = [entry[name] for entry in entries if name in entry]
    return round(sum(values) / len(values), 3) if values else None


def slowest(requests: Any) -> list[dict[str, Any]]:
    """Requests, the longest-lived first."""
    return sorted(requests, key=lambda request: -(request.get("total_s") or 0.0))


CLEAR, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 60
NONE = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="the server (http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (or QUIRE_API_KEY)")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (2)")
    parser.add_argument("--once", action="store_true", help="print one view of one interval, and leave")
    parser.add_argument("--json", action="store_true", help="print each view as a line of JSON")


def run(args: argparse.Namespace) -> int:
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
        if wait_readable(sys.stdin.fileno(), left) and sys.stdin.read(1) in ("q", "Q", ""):
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
