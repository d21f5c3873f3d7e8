"""`python -m bench client`: what the client of `quire bench serve` can take, beside a server that computes nothing.

Streams' tokens come as fast as the server writes them; the client's processor time tells how many a core of it can take in.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.benchmarks import common, serve_metrics
from quire.benchmarks.load import LoadJob, run_load
from quire.benchmarks.own_server import started
from quire.engine.arg_parser import flag
from quire.entrypoints.http_client import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--num-streams", 256, "answers at once")
    flag(parser, "--output-len", 512, "tokens of an answer")
    flag(parser, "--input-len", 512, "tokens of a prompt")
    flag(parser, "--num-clients", 1, "client processes")
    flag(parser, "--step-ms", 0.0, "time between two tokens of a stream (0: as fast as can be)")


@contextmanager
def started_source(step_s: float = 0.0) -> Iterator[str]:
    """The URL of a source of streams in another process."""
    with started("bench.sse_source", [str(step_s)], "http://") as (url, _):
        yield url


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    prompts = common.random_prompts(args.num_streams, [args.input_len] * args.num_streams, 30_000, seed=0)
    bodies = [
        json.dumps({"model": "source", "prompt": prompt, "max_tokens": args.output_len, "stream": True}).encode()
        for prompt in prompts
    ]
    with started_source(args.step_ms / 1000) as url:
        job = LoadJob(Target.parse(url), "/v1/completions", bodies, [0.0] * len(bodies))
        result = run_load(job, args.num_clients)
    measured = serve_metrics.build_figures(result.records, [args.input_len] * len(bodies), result.began)
    rate = measured["output_throughput"]
    figures = {
        **{name: getattr(args, name) for name in ("num_streams", "output_len", "num_clients")},
        **{
            name: measured[name]
            for name in ("failed", "duration", "output_throughput", "median_ttft_ms", "median_tpot_ms")
        },
        "client_cpu_share": result.cpu_share,
        "tokens_per_client_cpu_second": rate / result.cpu_share / args.num_clients,
        "machine": common.machine(),
    }
    names = [name for name in figures if name != "machine"]
    common.print_table("Client alone", [(name.replace("_", " "), figures[name]) for name in names])
    return figures
