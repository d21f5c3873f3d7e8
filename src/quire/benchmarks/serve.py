"""`quire bench serve`: load on an OpenAI server: a running one (`--base-url`), or one that is started for it.

Requests arrive all at once or by a Poisson process; each is streamed, and its first token, its gaps and its end are timed.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.benchmarks import common
from quire.benchmarks.http_load import RequestFigures, Target, get_json, stream_request
from quire.errors import ConfigError, EngineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server, the requests and their arrival."""
    server = parser.add_argument_group("Server")
    server.add_argument("--base-url", metavar="URL", help="a running server; without it one is started on 127.0.0.1")
    server.add_argument("--model", help="the model to start, or the name that a running server knows")
    server.add_argument("--server-args", default="", metavar="TEXT", help="flags for the server that is started")
    server.add_argument("--api-key", help="the server's key")
    server.add_argument("--endpoint", default="/v1/completions", help="the route (/v1/completions)")
    common.add_length_arguments(parser, input_len=128, output_len=64)
    load = parser.add_argument_group("Load")
    load.add_argument("--num-prompts", type=common.positive, default=64, help="requests (64)")
    load.add_argument("--request-rate", type=float, default=float("inf"), help="requests a second (inf: all at once)")
    load.add_argument(
        "--burstiness", type=float, default=1.0, help="shape of the gaps; 1 is Poisson, larger is steadier"
    )
    load.add_argument("--max-concurrency", type=common.positive, help="most requests at once")
    load.add_argument("--num-warmups", type=int, default=2, help="requests before measuring (2)")
    load.add_argument(
        "--vocab-size", type=common.positive, default=1000, help="random prompts use ids below this (1000)"
    )
    load.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (0)")
    load.add_argument("--no-ignore-eos", action="store_true", help="let answers end early")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON too")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, give the figures."""
    if not args.request_rate > 0:
        raise ConfigError(f"request_rate: {args.request_rate} must be above 0.", setting="request_rate")
    with _server(args) as url:
        target = Target.parse(url, args.api_key)
        figures = asyncio.run(_measure(args, target))
    _print(figures)
    return figures


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The URL of the server; one that was started is ended."""
    if args.base_url:
        yield args.base_url.rstrip("/").removesuffix("/v1")
        return
    import shlex

    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", "--port", "0"]
    command += ["--disable-uvicorn-access-log", *([args.model] if args.model else []), *shlex.split(args.server_args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _await_ready(process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(process: "subprocess.Popen[str]") -> str:
    """Read the server's output until it says where it is; a thread goes on reading, so that the pipe never fills."""
    import threading

    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if " is ready after " in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return line.rsplit(" at ", 1)[1].strip()
    raise EngineError(f"The server ended with code {process.wait()}: {''.join(lines[-15:]).strip()}")


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each request is sent, in seconds: gaps of a gamma distribution with mean 1/rate (shape 1 is Poisson)."""
    if rate == float("inf"):
        return [0.0] * count
    source = random.Random(seed)
    now = 0.0
    times: list[float] = []
    for _ in range(count):
        times.append(now)
        now += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


async def _measure(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    models = await _models(target)
    model = args.model if args.base_url and args.model else models[0]
    for index in range(args.num_warmups):
        warm = await _one(
            args, target, model, common.random_prompts(1, [args.input_len], args.vocab_size, -1 - index)[0], 4
        )
        if warm.error is not None:
            raise EngineError(f"A warm-up request failed: {warm.error}")
    inputs = common.random_lengths(args.num_prompts, args.input_len, args.range_ratio, args.bench_seed)
    outputs = common.random_lengths(args.num_prompts, args.output_len, args.range_ratio, args.bench_seed + 1)
    prompts = common.random_prompts(args.num_prompts, inputs, args.vocab_size, args.bench_seed, args.prefix_len)
    times = arrival_times(args.num_prompts, args.request_rate, args.burstiness, args.bench_seed)
    gate = asyncio.Semaphore(args.max_concurrency or args.num_prompts)
    done = 0
    began = last_told = time.perf_counter()

    async def one(prompt: list[int], output_len: int, at: float) -> RequestFigures:
        nonlocal done, last_told
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        async with gate:
            result = await _one(args, target, model, prompt, output_len)
        done += 1
        if time.perf_counter() - last_told > 2.0:
            last_told = time.perf_counter()
            print(f"requests: {done} of {args.num_prompts} ({last_told - began:.0f} s)", file=sys.stderr, flush=True)
        return result

    results = await asyncio.gather(*map(one, prompts, outputs, times))
    return build_figures(results, time.perf_counter() - began, model, args.request_rate)


async def _models(target: Target) -> list[str]:
    try:
        listed = await get_json(target, "/v1/models")
    except OSError as error:
        message = f"base_url: cannot reach {target.host}:{target.port}: {error}."
        raise ConfigError(message, setting="base_url") from None
    return [card["id"] for card in listed["data"]]


async def _one(
    args: argparse.Namespace, target: Target, model: str, prompt: list[int], output_len: int
) -> RequestFigures:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output_len,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not args.no_ignore_eos:
        body["ignore_eos"] = True
    if args.endpoint.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": " ".join(str(token) for token in prompt)}]
    else:
        body["prompt"] = prompt
    return await stream_request(target, args.endpoint, body, len(prompt))


def build_figures(results: list[RequestFigures], seconds: float, model: str, rate: float) -> dict[str, Any]:
    """Throughput and the four latencies, in milliseconds."""
    good = [result for result in results if result.error is None]
    failed = [result for result in results if result.error is not None]
    tokens = sum(result.output_tokens for result in good)
    prompt_tokens = sum(result.prompt_tokens for result in good)
    first = [(result.event_times[0] - result.sent) * 1000 for result in good if result.event_times]
    per_token = [
        (result.event_times[-1] - result.event_times[0]) * 1000 / (result.output_tokens - 1)
        for result in good
        if len(result.event_times) > 1 and result.output_tokens > 1
    ]
    gaps = [
        (after - before) * 1000
        for result in good
        for before, after in zip(result.event_times, result.event_times[1:], strict=False)
    ]
    return {
        "model": model,
        "request_rate": "inf" if rate == float("inf") else rate,
        "completed": len(good),
        "failed": len(failed),
        "first_error": failed[0].error if failed else None,
        "seconds": seconds,
        "input_tokens": prompt_tokens,
        "output_tokens": tokens,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + prompt_tokens) / seconds,
        "ttft_ms": common.summary(first),
        "tpot_ms": common.summary(per_token),
        "itl_ms": common.summary(gaps),
        "e2e_ms": common.summary([(result.finished - result.sent) * 1000 for result in good]),
        "machine": common.machine(),
    }


def _print(figures: dict[str, Any]) -> None:
    names = (
        "completed",
        "failed",
        "seconds",
        "requests_per_second",
        "output_tokens_per_second",
        "total_tokens_per_second",
    )
    rows = [(name.replace("_", " "), figures[name]) for name in names]
    if figures["first_error"]:
        rows.append(("first error", figures["first_error"][:100]))
    common.print_table(f"Serving: {figures['model']}, {figures['request_rate']} requests/s", rows)
    labels = {
        "ttft_ms": "time to first token",
        "tpot_ms": "time per output token",
        "itl_ms": "inter-token latency",
        "e2e_ms": "end to end",
    }
    columns = ("mean", "p50", "p90", "p99")
    table = [[label, *(figures[name].get(column, 0.0) for column in columns)] for name, label in labels.items()]
    common.print_columns("Latency, ms", ("", *columns), table)
