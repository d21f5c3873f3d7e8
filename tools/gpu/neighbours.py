"""What a long prompt does to its neighbours: their time between tokens while it is computed, and what a bound costs.

For each server (its flags in quotes): streams decode, long prompts of new tokens arrive one after another; then a burst of
prompts and answers says how much work the server does in a second. Servers are measured one after another, twice, in opposite
orders:
`python tools/gpu/neighbours.py --base "--model MODEL --load-format dummy" --serve "--max-step-ms 0" --serve "--max-step-ms 10"`.
Prints a table, writes JSON.
"""

import argparse
import asyncio
import json
import random
import shlex
import statistics
import time
from pathlib import Path
from typing import Any

from kill_core import Answer, Server, Stream

from quire.descriptors import raise_limit


def body(source: random.Random, most_id: int, size: int, length: int) -> dict[str, Any]:
    return {
        "prompt": [source.randrange(10, most_id) for _ in range(size)],
        "max_tokens": length,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
    }


def gaps_within(answers: list[Answer], begin: float, end: float) -> list[float]:
    """Milliseconds between two tokens of a stream, of which the later came within."""
    return [
        1e3 * (b - a) for one in answers for a, b in zip(one.times, one.times[1:], strict=False) if begin <= b <= end
    ]


def shares(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    at = {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in (("p50", 0.5), ("p99", 0.99))}
    return {name: round(value, 3) for name, value in {**at, "max": ordered[-1]}.items()}


async def neighbours(server: Server, args: argparse.Namespace, source: random.Random) -> dict[str, Any]:
    """Streams, and long prompts among them."""
    streams = [
        await Stream.open(server.target, body(source, args.most_id, 64, args.output_len)) for _ in range(args.streams)
    ]
    while min(len(one.chunks) for one in streams) < args.output_len // 16:
        await asyncio.sleep(0.005)
    loads: list[tuple[float, float, float]] = []
    quiet_begin = time.perf_counter()
    await asyncio.sleep(args.quiet)
    quiet_end = time.perf_counter()
    for _ in range(args.prompts):
        long = await Stream.open(server.target, body(source, args.most_id, args.long, 4))
        await asyncio.wait_for(long.done, 60)
        answer = long.answer()
        if not answer.times:
            raise SystemExit(f"the long prompt failed: {answer.error}")
        loads.append((long.began, answer.times[0], answer.times[0] - long.began))
        await asyncio.sleep(args.quiet / 4)
    still = sum(not one.done.done() for one in streams)
    for one in streams:
        one.close()
    answers = [one.answer() for one in streams]
    return {
        "still_running": still,
        "quiet_ms": shares(gaps_within(answers, quiet_begin, quiet_end)),
        "beside_ms": shares([gap for begin, end, _ in loads for gap in gaps_within(answers, begin, end)]),
        "ttft_ms": round(1e3 * statistics.median(seconds for *_, seconds in loads), 1),
    }


async def burst(server: Server, args: argparse.Namespace, source: random.Random) -> float:
    """Tokens a second, prompts and answers together, of requests that come at once."""
    bodies = [body(source, args.most_id, args.burst_input, args.burst_output) for _ in range(args.burst)]
    streams = [await Stream.open(server.target, each) for each in bodies]
    await asyncio.wait([one.done for one in streams], timeout=120)
    answers = [one.answer() for one in streams]
    if failed := [one.error for one in answers if not one.times]:
        raise SystemExit(f"{len(failed)} requests of a burst failed: {failed[0]}")
    seconds = max(one.times[-1] for one in answers) - min(one.began for one in streams)
    return (args.burst * args.burst_input + sum(len(one.tokens) for one in answers)) / seconds


async def measure(server: Server, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    source = random.Random(seed)
    await burst(server, args, source)  # for warmth: sizes are captured, the cost model is fitted
    figures = await neighbours(server, args, source)
    again = await neighbours(server, args, source)
    rates = [round(await burst(server, args, source)) for _ in range(args.bursts)]
    return {"first": figures, "second": again, "burst_tokens_per_s": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="flags of all servers")
    parser.add_argument("--serve", action="append", required=True, help="flags of one server")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=4000)
    parser.add_argument("--long", type=int, default=32_000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=1.0)
    parser.add_argument("--burst", type=int, default=64)
    parser.add_argument("--burst-input", type=int, default=2000)
    parser.add_argument("--burst-output", type=int, default=128)
    parser.add_argument("--bursts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--most-id", type=int, default=150_000)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    raise_limit(args.streams + args.burst + 200)
    report: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for text in args.serve if number % 2 == 0 else args.serve[::-1]:
            try:
                server = Server([*shlex.split(args.base), *shlex.split(text)])
            except SystemExit as error:  # a flag that this version does not have
                print(f"{text}: {str(error)[-300:]}", flush=True)
                continue
            try:
                found = asyncio.run(measure(server, args, number))
            except (Exception, SystemExit) as error:
                print(f"{text}: {type(error).__name__}: {str(error)[-600:]}", flush=True)
                continue
            finally:
                server.end()
            report.append({"serve": text, "round": number, **found})
            Path(args.json).write_text(json.dumps(report, indent=1))
            for name in ("first", "second"):
                print(f"{text or 'default':24} {name:6} {found[name]}")
            print(f"{'':24} burst, tokens/s {found['burst_tokens_per_s']}", flush=True)


if __name__ == "__main__":
    main()
