"""`python -m bench servers`: two ways to run `quire serve` on the same machine, in rounds that alternate between them.

Both servers are up all the time; an idle one uses no processor. What counts is the median of the rounds' ratios: a machine that
others share drifts within minutes, two runs of the same round hardly differ by that. Without flags: the engine core in a
process of its own beside a core in a thread of the server.
"""

import argparse
import contextlib
import json
import random
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.tables import print_records

from quire.benchmarks import common
from quire.benchmarks.load import LoadJob, run_load
from quire.benchmarks.own_server import started_server
from quire.benchmarks.serve_metrics import build_figures
from quire.engine.arg_parser import flag, positive
from quire.entrypoints.http_client import Target
from quire.errors import EngineError

HIGHER_IS_BETTER = {"output_throughput": True, "median_ttft_ms": False, "median_tpot_ms": False}
THREAD, PROCESS = "QUIRE_ENABLE_MULTIPROCESSING=0", "QUIRE_ENABLE_MULTIPROCESSING=1"
_WORDS = ("time", "people", "water", "number", "house", "light", "story", "morning")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 16], help="requests at once (1 16)")
    flag(parser, "--requests", 3, "requests a stream and round")
    flag(parser, "--input-words", 48, "words a prompt")
    flag(parser, "--output-len", 96, "tokens an answer")
    flag(parser, "--rounds", 9, "rounds that are measured")
    flag(parser, "--base", THREAD, "the server to compare with: NAME=VALUE variables and flags, as a shell has them")
    flag(parser, "--new", PROCESS, "the server in question, in the same way")
    flag(parser, "--serve", "", "flags of both servers")


def split_words(text: str) -> tuple[dict[str, str], list[str]]:
    """Variables and flags of a server."""
    words = shlex.split(text)
    count = next((i for i, word in enumerate(words) if word.startswith("-") or "=" not in word), len(words))
    return {name: value for name, _, value in (word.partition("=") for word in words[:count])}, words[count:]


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        targets: list[Target] = []
        for text in (args.base, args.new):
            variables, flags = split_words(text)
            url = stack.enter_context(started_server([*flags, *shlex.split(args.serve)], variables))
            targets.append(Target.parse(url))
        results = [_compare(args, targets, streams) for streams in args.streams]
    columns = {"streams": "streams", "figure": "figure", "base": "base", "new": "new", "times better": "times_better"}
    title = f"new: {args.new}; base: {args.base}; medians of {args.rounds} rounds"
    print_records(title, columns, [row for rows in results for row in rows])
    return {
        "base": args.base,
        "new": args.new,
        "serve": args.serve,
        "rounds": args.rounds,
        "requests": args.requests,
        "output_len": args.output_len,
        "machine": common.machine(),
        "figures": [row for rows in results for row in rows],
    }


def _compare(args: argparse.Namespace, targets: Sequence[Target], streams: int) -> list[dict[str, Any]]:
    """Rounds at one number of streams: a row for each figure."""
    samples: list[list[Mapping[str, float]]] = [[], []]
    for target in targets:
        _measure(args, target, streams, seed=0)  # once for warmth
    for number in common.progress(range(args.rounds), args.rounds, f"{streams} streams"):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            samples[which].append(_measure(args, targets[which], streams, seed=number + 1))
    rows: list[dict[str, Any]] = []
    for figure, is_higher in HIGHER_IS_BETTER.items():
        base, new = ([sample[figure] for sample in side] for side in samples)
        ratios = [(b / a) if is_higher else (a / b) for a, b in zip(base, new, strict=True)]
        row = {"streams": streams, "figure": figure, "base": statistics.median(base), "new": statistics.median(new)}
        rows.append(row | {"times_better": round(statistics.median(ratios), 4), "ratios": ratios})
    return rows


def _measure(args: argparse.Namespace, target: Target, streams: int, seed: int) -> Mapping[str, float]:
    """One run: the same requests for both servers of a round. Raises EngineError: one failed."""
    source = random.Random(seed)
    bodies = [
        json.dumps(
            {
                "prompt": " ".join(source.choices(_WORDS, k=args.input_words)),
                "max_tokens": args.output_len,
                "min_tokens": args.output_len,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for _ in range(args.requests * streams)
    ]
    job = LoadJob(target, "/v1/completions", bodies, [0.0] * len(bodies), max_concurrency=streams)
    result = run_load(job)
    if errors := [record.error for record in result.records if record.error]:
        raise EngineError(f"{len(errors)} of {len(bodies)} requests failed; the first: {errors[0]}")
    return build_figures(result.records, [None] * len(bodies), result.began)
