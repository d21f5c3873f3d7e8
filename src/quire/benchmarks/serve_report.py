"""How the figures of `quire bench serve` are shown and kept: vLLM's table, its file names and keys.

Knows figures. Knows nothing of requests.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from quire.benchmarks.common import write_text
from quire.benchmarks.serve_metrics import METRICS
from quire.errors import ConfigError

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

    Raises:
        ConfigError: it cannot be written.
    """
    write_text(path, json.dumps(figures, allow_nan=False) + "\n", "result_dir", "a" if append else "w")


def timestamp() -> str:
    """The moment, as result files name it."""
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
