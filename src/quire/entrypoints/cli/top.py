"""`quire top`: a running server's queues, pages, tokens and slowest requests, in the terminal, again and again."""

import argparse
import collections
import contextlib
import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.descriptors import wait_readable
from quire.engine.arg_parser import only
from quire.entrypoints.cli.running import latest_url
from quire.entrypoints.cli.terminal import BOLD, DIM, RESET, is_styled, printable
from quire.entrypoints.http_client import OpenAIClient
from quire.errors import ConfigError, EngineError, QuireError, RequestError

TIMEOUT_S = 10.0
METRIC = re.compile("(quire|vllm):(.+)")
KV_USAGE = "kv_cache_usage_perc"
MEANS = {
    "first_token_s": "time_to_first_token_seconds",
    "inter_token_s": "inter_token_latency_seconds",
    "request_s": "e2e_request_latency_seconds",
}
FINISHED = "request_success_total"
EVENTS = {
    "restarts": "engine_restarts_total",
    "replayed": "requests_replayed_total",
    "given_up": "requests_given_up_total",
    "refused": "admission_rejections_total",
    "deadlines_missed": "request_deadlines_missed_total",
}
"""What happened since the server's start besides answers, and the metrics that count it."""


@dataclasses.dataclass
class Sample:
    """A server's figures at one moment. Counters are since its start.

    Attributes:
        metrics: each metric's values added up; of the share of the KV cache that is used, their mean.
        finished: requests by the reason of their end.
        state: what the console shows; empty of another server.
    """

    at: float
    model: str = ""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    finished: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    state: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


class ServerWatch:
    """Takes samples of the server at `url`.

    Raises:
        ConfigError: no server answers there.
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

    def ask(self, path: str) -> Any:
        """What it answers to a GET; None if it has no such route."""
        try:
            return json.loads(self._client.get(path))
        except (QuireError, ValueError):
            return None


def read_metrics(text: str, at: float) -> Sample:
    """A sample of Prometheus' text; engines of one server are added up, their cache use is the mean.
    Raises EngineError: it has none of the figures."""
    from prometheus_client.parser import text_string_to_metric_families

    sample = Sample(at)
    values: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    prefix: str | None = None  # a server may tell the same under both
    try:
        for family in text_string_to_metric_families(text):
            for each in family.samples:
                if (known := METRIC.fullmatch(each.name)) is None or known[1] != (prefix := prefix or known[1]):
                    continue
                values[known[2]].append(each.value)
                sample.model = sample.model or each.labels.get("model_name", "")
                if known[2] == FINISHED:
                    reason = each.labels.get("finished_reason", "?")
                    sample.finished[reason] = sample.finished.get(reason, 0.0) + each.value
    except ValueError as error:
        raise EngineError(f"what /metrics gives cannot be read: {error}") from None
    if not values:
        raise EngineError("what /metrics gives has none of the figures of Quire or vLLM")
    sample.metrics = {name: sum(each) for name, each in values.items()}
    if KV_USAGE in values:
        sample.metrics[KV_USAGE] /= len(values[KV_USAGE])
    return sample


def figures(before: Sample, now: Sample) -> dict[str, Any]:
    """What happened between two samples, for people and scripts: rates a second, means in seconds, shares from 0 to 1.

    A figure is None where nothing happened or the server does not tell.
    """
    seconds = max(now.at - before.at, 1e-9)

    def grown(name: str) -> float:
        return max(0.0, now.metrics.get(name, 0.0) - before.metrics.get(name, 0.0))

    def per_second(name: str) -> float:
        return round(grown(name) / seconds, 2)

    def mean(name: str) -> float | None:
        return _ratio(
            now.metrics.get(f"{name}_sum", 0.0) - before.metrics.get(f"{name}_sum", 0.0), grown(f"{name}_count")
        )

    state = now.state
    seen = {entry["id"] for entry in before.state.get("steps", ())}
    steps = [entry for entry in state.get("steps", ()) if entry["id"] not in seen]
    ends = {reason: count - before.finished.get(reason, 0.0) for reason, count in now.finished.items()}
    hits, queries = "prefix_cache_hits_total", "prefix_cache_queries_total"
    return {
        "model": state.get("model") or now.model,
        "version": state.get("version"),
        "uptime_s": state.get("uptime_s"),
        "running": int(now.metrics.get("num_requests_running", 0)),
        "waiting": int(now.metrics.get("num_requests_waiting", 0)),
        "kv_usage": now.metrics.get(KV_USAGE),
        "num_pages": state.get("num_pages"),
        "free_pages": state.get("free_pages"),
        "generation_tokens_per_s": per_second("generation_tokens_total"),
        "prompt_tokens_per_s": per_second("prompt_tokens_total"),
        "prefix_hit_share": _ratio(grown(hits), grown(queries)),
        "prefix_hit_share_ever": _ratio(now.metrics.get(hits, 0.0), now.metrics.get(queries, 0.0)),
        "steps_per_s": per_second("engine_steps_total"),
        "step_ms": _mean_of(steps, "ms"),
        "step_predicted_ms": _mean_of(steps, "predicted_ms"),
        "step_tokens": _mean_of(steps, "num_tokens"),
        "last_step_ms": (state.get("step") or {}).get("ms"),
        **{ours: mean(name) for ours, name in MEANS.items()},
        "finished_per_s": {reason: round(count / seconds, 2) for reason, count in ends.items()},
        "preemptions": int(grown("num_preemptions_total")),
        "happened": {ours: int(now.metrics[name]) for ours, name in EVENTS.items() if name in now.metrics},
        "events": list(reversed(state.get("events", ()))),
        "problem": state.get("problem"),
        "requests": _slowest(state.get("requests", ())),
        "finished": _slowest(state.get("finished", ())),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mean_of(entries: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [entry[name] for entry in entries if name in entry]
    return round(sum(values) / len(values), 3) if values else None


def _slowest(requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests, the longest-lived first."""
    return sorted(requests, key=lambda request: -(request.get("total_s") or 0.0))


CLEAR, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
STYLE = re.compile(r"(\x1b\[\d*m)")
BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 60
SHOWN_EVENTS = 5
NONE = "-"


add_arguments = only(
    ("url", None, "the server (the latest of `quire ps`, or http://127.0.0.1:8000)", {"nargs": "?", "metavar": "URL"}),
    ("--api-key", None, "the server's key (or QUIRE_API_KEY)", {"metavar": "KEY"}),
    ("--interval", 2.0, "between two looks", {"metavar": "SECONDS"}),
    ("--once", False, "print one view of one interval, and leave"),
    ("--json", False, "print each view as a line of JSON"),
)


def run(args: argparse.Namespace) -> None:
    from quire import envs

    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"interval={args.interval} must be from 0.05 to 3600 seconds.", setting="interval")
    watch = ServerWatch(args.url or latest_url(), args.api_key or envs.QUIRE_API_KEY)
    before = watch.sample()
    if not (args.once or args.json) and sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt), _screen():
            _show(watch, before, args.interval)
        return
    while True:
        time.sleep(args.interval)
        now = watch.sample()
        shown = figures(before, now)
        print(json.dumps(shown) if args.json else as_text(shown, watch.url, ()), flush=True)
        if args.once:
            return
        before = now


def _show(watch: ServerWatch, before: Sample, interval: float) -> None:
    rates: collections.deque[float] = collections.deque(maxlen=HISTORY)
    while not _wait_for_quit(interval):
        try:
            now = watch.sample()
        except QuireError as error:
            _fill_screen(f"{error}\n\ntrying again every {interval:g} s; q leaves")
            continue
        shown = figures(before, now)
        rates.append(shown["generation_tokens_per_s"])
        _fill_screen(as_text(shown, watch.url, rates, styled=is_styled(sys.stdout)))
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
    print(ENTER, end="", flush=True)
    try:
        yield
    finally:
        print(LEAVE, end="", flush=True)
        if kept is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)


def _fill_screen(text: str) -> None:
    """Show as much of a text as fits; a line too long is cut."""
    width, height = shutil.get_terminal_size()
    lines = [cut(line, width) for line in text.split("\n")[: height - 1]]
    print(CLEAR + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_REST, end="", flush=True)


def cut(line: str, width: int) -> str:
    """A line's first `width` columns, styles not counted."""
    pieces: list[str] = []
    for piece in STYLE.split(line):
        is_style = STYLE.fullmatch(piece) is not None
        pieces.append(piece if is_style else piece[:width])
        width -= 0 if is_style else len(pieces[-1])
    return "".join(pieces)


def as_text(shown: Mapping[str, Any], url: str, rates: Sequence[float], *, styled: bool = False) -> str:
    """The view: a headline, figures, and the requests that take longest."""

    def style(code: str, text: str) -> str:
        return f"{code}{text}{RESET}" if styled else text

    head = f"{shown['model']} at {url}"
    if shown["version"]:
        head += f"  version {shown['version']}"
    if shown["uptime_s"] is not None:
        head += f"  up {_clock(shown['uptime_s'])}"
    lines = [style(BOLD, head), "", *(style(DIM, f"{name:<12}") + text for name, text in _rows(shown, rates).items())]
    if shown["events"]:
        lines += ["", style(BOLD, "what happened, latest first:"), *map(_event_row, shown["events"][:SHOWN_EVENTS])]
    for title, name in (("running, longest first", "requests"), ("finished, slowest of the last", "finished")):
        if shown[name]:
            lines += ["", style(BOLD, f"{title}:"), style(DIM, _TABLE_HEAD), *map(_request_row, shown[name][:12])]
    return "\n".join(lines)


def _rows(shown: Mapping[str, Any], rates: Sequence[float]) -> dict[str, str]:
    pages, free, usage = shown["num_pages"], shown["free_pages"], shown["kv_usage"]
    used = f"  {pages - free:,} of {pages:,}" if pages is not None and free is not None else ""
    bar = "█" * round(30 * min(max(usage or 0.0, 0.0), 1.0))
    ends = ", ".join(f"{reason} {rate:g}/s" for reason, rate in shown["finished_per_s"].items() if rate)
    step = f"{_number(shown['step_ms'], 'ms')}  predicted {_number(shown['step_predicted_ms'], 'ms')}"
    generated, prompts = shown["generation_tokens_per_s"], shown["prompt_tokens_per_s"]
    first, between, whole = (_seconds(shown[name]) for name in MEANS)
    happened = "  ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in shown["happened"].items())
    return {
        **({"problem": printable(shown["problem"])} if shown["problem"] else {}),
        "requests": f"{shown['running']} running  {shown['waiting']} waiting  {shown['preemptions']} preempted",
        "finished": ends or NONE,
        "KV pages": f"{bar:░<30} {_share(usage)}{used}",
        "tokens/s": f"{generated:,.0f} generated  {prompts:,.0f} of prompts  {_bars(rates)}",
        "prefix hits": f"{_share(shown['prefix_hit_share'])} now  {_share(shown['prefix_hit_share_ever'])} ever",
        "step": f"{step}  {_number(shown['step_tokens'], 'tokens')}  {shown['steps_per_s']:g} a second",
        "latency": f"first token {first}  between tokens {between}  whole {whole}",
        "so far": happened or NONE,
    }


def _event_row(event: Mapping[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.get("at", 0)))
    times = f" ({event['count']:,} times)" if event.get("count", 1) > 1 else ""
    return f"{at}  {printable(str(event.get('kind', ''))):<9} {printable(str(event.get('text', '')))}{times}"


_COLUMNS = (("prompt", 8), ("cached", 8), ("output", 7), ("tokens/s", 9), ("queued", 8), ("first", 8), ("total", 8))
_TABLE_HEAD = f"{'request':<44} {'state':<10} " + " ".join(f"{name:>{width}}" for name, width in _COLUMNS)


def _request_row(request: Mapping[str, Any]) -> str:
    reason = request.get("reason") or request.get("state", "")
    return (
        f"{printable(request.get('id', ''))[:44]:<44} {reason:<10} {request.get('prompt_tokens', 0):>8,}"
        f" {request.get('cached_tokens', 0):>8,} {request.get('output_tokens', 0):>7,}"
        f" {request.get('tokens_per_second', 0.0):>9,.1f} {_seconds(request.get('queued_s')):>8}"
        f" {_seconds(request.get('first_token_s')):>8} {_seconds(request.get('total_s')):>8}"
    )


def _bars(values: Sequence[float]) -> str:
    """Values as bars of eight heights; the largest is full."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    return "".join(BARS[0 if value <= 0 else max(1, round(8 * value / most))] for value in values)


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
