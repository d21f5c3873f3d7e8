"""What a load's moments mean: throughput, latencies, goodput under service levels, peaks. vLLM's names and meanings.

All of a request's times count from when it was sent (`sent`):

- TTFT: to its first event with tokens.
- TPOT: from the first event to the last, over the tokens but one; only of answers of two events or more.
- ITL: each gap between two events. An event may carry several tokens.
- E2EL: to its last event.

Also how they are shown and kept: vLLM's table, its file names and keys. Knows records. Knows nothing of sockets.
"""

import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from quire.benchmarks.common import percentile, write_text
from quire.benchmarks.http_load import RequestRecord
from quire.errors import ConfigError

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLatency:
    """One request that succeeded; times in milliseconds.

    Attributes:
        tpot: None for an answer that came in one event.
    """

    input_tokens: int
    output_tokens: int
    ttft: float
    tpot: float | None
    itl: list[float]
    e2el: float


def measure_request(record: RequestRecord, planned_input: int | None) -> RequestLatency:
    """The latencies of a request that succeeded. `planned_input`: its prompt's tokens, where the server told nothing; None if
    unknown."""
    times = record.event_times
    inputs = record.input_tokens if record.input_tokens is not None else planned_input or 0
    outputs = record.output_tokens if record.output_tokens is not None else len(times)
    if not times:
        return RequestLatency(inputs, outputs, 0.0, None, [], (record.finished - record.sent) * 1000)
    return RequestLatency(
        input_tokens=inputs,
        output_tokens=outputs,
        ttft=(times[0] - record.sent) * 1000,
        tpot=(record.ended - times[0]) * 1000 / (outputs - 1) if outputs > 1 and len(times) > 1 else None,
        itl=[(after - before) * 1000 for before, after in itertools.pairwise(times)],
        e2el=(record.ended - record.sent) * 1000,
    )


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Service levels in milliseconds, from `ttft:200 tpot:20`.
    Raises ConfigError: another name, or no number above 0."""
    levels: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            level = float(text)
        except ValueError:
            level = 0.0
        if name not in SLO_METRICS or not level > 0:
            message = f"{word!r} is no service level; write {', '.join(SLO_METRICS)} with milliseconds: ttft:200."
            raise ConfigError.of("goodput", message)
        levels[name] = level
    return levels


def meets(request: RequestLatency, levels: dict[str, float]) -> bool:
    """Whether a request keeps every service level; an answer that came in one event keeps that of TPOT."""
    return all((getattr(request, name) or 0.0) <= level for name, level in levels.items())


def peak_output_tokens(records: Sequence[RequestRecord], began: float) -> float:
    """Output tokens of the best second, in whole seconds from the start; an event counts an even share of its answer."""
    seconds: dict[int, float] = {}
    for record in records:
        if not record.event_times:
            continue
        tokens = record.output_tokens if record.output_tokens is not None else len(record.event_times)
        share = tokens / len(record.event_times)
        for at in record.event_times:
            second = int(at - began)
            seconds[second] = seconds.get(second, 0.0) + share
    return max(seconds.values(), default=0.0)


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """The most requests that were under way at one moment."""
    moves = sorted(
        move for record in records for move in ((record.sent, 1), (max(record.finished, record.sent + 1e-9), -1))
    )
    running = most = 0
    for _, change in moves:
        running += change
        most = max(most, running)
    return most


def build_figures(
    records: Sequence[RequestRecord],
    planned_inputs: Sequence[int | None],
    began: float,
    shares: Sequence[float] = (99.0,),
    levels: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run under vLLM's keys: seconds, tokens a second, milliseconds.

    Args:
        planned_inputs: prompt tokens of each request, as the data set counted them.
        began: `time.perf_counter()` when the load started.
        shares: percentiles, 0 to 100.
        levels: service levels, for `request_goodput`.
    """
    good = [
        measure_request(record, planned)
        for record, planned in zip(records, planned_inputs, strict=True)
        if not record.error
    ]
    seconds = max((record.finished for record in records), default=began) - began
    seconds = max(seconds, 1e-9)
    inputs, outputs = sum(one.input_tokens for one in good), sum(one.output_tokens for one in good)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(meets(one, levels) for one in good) / seconds if levels else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": peak_output_tokens([record for record in records if not record.error], began),
        "max_concurrent_requests": peak_concurrency(records),
    }
    columns = {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.tpot is not None],
        "itl": [gap for one in good for gap in one.itl],
        "e2el": [one.e2el for one in good],
    }
    for name, values in columns.items():
        figures |= _statistics(name, values, shares)
    return figures | {"tokens_per_event": outputs / max(1, sum(len(one.itl) + 1 for one in good))}


def _statistics(name: str, values: list[float], shares: Sequence[float]) -> dict[str, float]:
    figures = {
        f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": statistics.pstdev(values) if values else 0.0,
    }
    ranked = sorted(values)
    return figures | {f"p{share:g}_{name}_ms": percentile(ranked, share) for share in shares}


def detailed(records: Sequence[RequestRecord], planned_inputs: Sequence[int | None], began: float) -> dict[str, Any]:
    """What each request saw, in seconds, under vLLM's keys: of failed requests, empty values and the error."""
    found = [
        None if record.error else measure_request(record, planned)
        for record, planned in zip(records, planned_inputs, strict=True)
    ]
    return {
        "input_lens": [
            one.input_tokens if one else planned or 0 for one, planned in zip(found, planned_inputs, strict=True)
        ],
        "output_lens": [one.output_tokens if one else 0 for one in found],
        "start_times": [record.sent - began for record in records],
        "ttfts": [one.ttft / 1000 if one else 0.0 for one in found],
        "itls": [[gap / 1000 for gap in one.itl] if one else [] for one in found],
        "e2els": [one.e2el / 1000 if one else 0.0 for one in found],
        "generated_texts": [record.text or "" for record in records],
        "errors": [record.error for record in records],
    }


WIDTH = 50
COARSE_EVENTS = 3.0
"""Tokens an event above which latencies are hardly those of tokens."""
BUSY_CLIENT = 0.7
"""Above this share of a core the client's own work shows in the figures."""


def print_report(figures: dict[str, Any], metrics: Sequence[str], shares: Sequence[float]) -> None:
    """The table, with the lines that scripts written for vLLM look for."""
    print(f"\n{' Serving Benchmark Result ':=^{WIDTH}}")
    rate = figures["request_rate"]
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
        ("Maximum request concurrency:", figures["max_concurrency"]),
        ("Request rate configured (RPS):", None if rate == "inf" else float(rate)),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Request goodput (req/s):", figures["request_goodput"]),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", figures["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    _print_rows([row for row in rows if row[1] is not None])
    for name in metrics:
        print(f"{METRICS[name]:-^{WIDTH}}")
        label = name.upper()
        rows = [
            (f"Mean {label} (ms):", figures[f"mean_{name}_ms"]),
            (f"Median {label} (ms):", figures[f"median_{name}_ms"]),
        ]
        rows += [(f"P{share:g} {label} (ms):", figures[f"p{share:g}_{name}_ms"]) for share in shares]
        _print_rows(rows)
    print("=" * WIDTH)
    if figures["failed"]:
        print(f"First failure: {figures['first_error'][:300]}")
    if figures["tokens_per_event"] > COARSE_EVENTS:
        print(
            f"The server sent {figures['tokens_per_event']:.1f} tokens in an event: first tokens and gaps are those of events. "
            "A server without a tokenizer tells of each token with --extra-body '{\"return_token_ids\": true}'."
        )
    client = figures["client"]
    if client["cpu_share"] > BUSY_CLIENT:
        print(
            f"The client was busy {client['cpu_share']:.0%} of the time: these figures are partly its own. "
            f"Use --num-clients {client['processes'] * 2}."
        )
    print(flush=True)


def _print_rows(rows: Sequence[tuple[str, Any]]) -> None:
    for label, value in rows:
        print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")


def result_path(directory: str | None, name: str | None, figures: dict[str, Any]) -> str:
    """Where a result is kept: the name asked for, or one made of backend, rate, concurrency, model and time."""
    if name is None:
        rate = figures["request_rate"]
        most = figures["max_concurrency"]
        parts = [
            figures["label"] or figures["endpoint_type"],
            f"{rate if isinstance(rate, str) else format(rate, 'g')}qps",
            *([f"concurrency{most}"] if most is not None else []),
            os.path.basename(figures["model_id"].rstrip("/")),
            figures["date"],
        ]
        name = "-".join(parts) + ".json"
    return os.path.join(directory, name) if directory else name


def write_result(path: str, figures: dict[str, Any], append: bool = False) -> None:
    """Write a result as JSON; with `append` as one more line of a file of results.
    Raises ConfigError: it cannot be written."""
    write_text(path, json.dumps(figures, allow_nan=False) + "\n", "result_dir", "a" if append else "w")


def timestamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def parse_shares(text: str) -> list[float]:
    """Percentiles from `50,99.9`. Raises ConfigError: no number from 0 to 100."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [math.nan]
    if not all(0 <= share <= 100 for share in shares):
        message = f"{text!r} must be numbers from 0 to 100, with commas between: 50,90,99."
        raise ConfigError.of("metric_percentiles", message)
    return shares


def parse_metrics(text: str) -> list[str]:
    """Names of latencies from `ttft,tpot`. Raises ConfigError: another name."""
    names = text.split(",")
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError.of("percentile_metrics", f"{unknown[0]!r} is not known; there are {', '.join(METRICS)}.")
    return names
