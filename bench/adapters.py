"""A thousand adapters on disk, asked for by Zipf's law: throughput and time to first token beside the base model's.

    python -m bench adapters --json bench/results/adapters-zipf.json

Requests arrive at random times. Both sides get the same arrivals, prompts and lengths, in turns: the base alone, and each request
with the adapter that its draw names. Few places in host memory serve all adapters: many wait for a disk. With few places on the
device too (`--max-loras 16`), as many adapters take part in a step, and requests of others wait for their end.
"""

import argparse
import asyncio
import os
import tempfile
import time
from typing import Any

import numpy as np

from quire import AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams
from quire.benchmarks import common
from quire.engine.arg_parser import Flags, add_flags

FLAGS: Flags = (
    ("--model", "quire-demo", "the base"),
    ("--adapters", 1000, "adapters on disk"),
    ("--rank", 16, "of each"),
    ("--exponent", 1.0, "of Zipf's law"),
    ("--requests", 400, "of a round"),
    ("--rate", 20.0, "requests a second"),
    ("--input-len", 64, "tokens a prompt"),
    ("--output-len", 16, "tokens an answer"),
    ("--max-loras", 0, "places on the device; 0: as many as the engine gives, a place for each row"),
    ("--max-cpu-loras", 64, "places in host memory"),
    ("--rounds", 3, "of both sides"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, {"": FLAGS})


async def run_side(
    engine: AsyncLLM, args: argparse.Namespace, adapters: list[LoRARequest], seed: int
) -> dict[str, Any]:
    """One side of a round: the requests of a seed, with adapters if there are some."""
    random = np.random.default_rng(seed)
    vocab = engine.model_config.vocab_size
    arrivals = np.cumsum(random.exponential(1 / args.rate, args.requests))
    weights = np.arange(1, args.adapters + 1) ** -args.exponent
    drawn = random.choice(args.adapters, args.requests, p=weights / weights.sum())
    prompts = random.integers(10, vocab, (args.requests, args.input_len)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    told = _loads(engine)
    began, firsts = time.perf_counter(), np.zeros(args.requests)

    async def ask(index: int) -> None:
        due = began + arrivals[index]
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        adapter = adapters[drawn[index]] if adapters else None
        given: Any = {"prompt_token_ids": prompts[index]}
        async for output in engine.generate(given, params, f"{seed}-{bool(adapters)}-{index}", lora_request=adapter):
            if output.error is not None:
                raise RuntimeError(output.error)
            if not firsts[index]:
                firsts[index] = time.perf_counter() - due

    await asyncio.gather(*(ask(index) for index in range(args.requests)))
    seconds = time.perf_counter() - began
    return {
        "requests_per_second": args.requests / seconds,
        "ttft_ms": {f"p{p}": float(np.percentile(firsts, p)) * 1e3 for p in (50, 90, 99)},
        "distinct_adapters": len(set(drawn.tolist())) if adapters else 0,
        "load_ms": _load_ms(engine, told),
    }


def _loads(engine: AsyncLLM) -> tuple[int, float]:
    """How many adapters were loaded so far, from disk or from the host, and the seconds that took."""
    if engine.metrics is None:
        return 0, 0.0
    times = engine.metrics.histograms["lora_load_time_seconds"]
    return sum(times.counts), times.total


def _load_ms(engine: AsyncLLM, told: tuple[int, float]) -> float | None:
    """The mean of those since then."""
    count, seconds = (now - then for now, then in zip(_loads(engine), told, strict=True))
    return seconds / count * 1e3 if count else None


async def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=args.model, enable_lora=True, max_loras=args.max_loras or None, max_cpu_loras=args.max_cpu_loras,
            max_lora_rank=args.rank, max_model_len=1024, enable_prefix_caching=False,
        )
    )  # fmt: skip
    try:
        adapters = [LoRARequest(f"a{n}", n, os.path.join(folder, str(n))) for n in range(1, args.adapters + 1)]
        for adapter in adapters:
            await engine.collective_rpc(
                "write_random_adapter", args=(adapter.lora_path, args.rank, adapter.lora_int_id, None, 0.5)
            )
        sides: dict[str, list[dict[str, Any]]] = {"base": [], "adapters": []}
        await run_side(engine, args, [], 0)
        for number in range(1, args.rounds + 1):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                sides[name].append(await run_side(engine, args, adapters if name == "adapters" else [], number))
        return sides
    finally:
        engine.shutdown()


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="quire-adapters-") as folder:
        sides = asyncio.run(run(args, folder))
    rows = [
        [
            name,
            str(number),
            f"{side['requests_per_second']:.1f}",
            *(f"{value:.1f}" for value in side["ttft_ms"].values()),
        ]
        for name, rounds in sides.items()
        for number, side in enumerate(rounds, 1)
    ]
    header = ("side", "round", "requests/s", "TTFT p50, ms", "p90", "p99")
    common.print_columns(f"{args.adapters} adapters of rank {args.rank}, {args.rate:g} requests/s", header, rows)
    settings = {name.lstrip("-").replace("-", "_"): default for name, default, *_ in FLAGS}
    return {"settings": {name: getattr(args, name) for name in settings}, **sides, "machine": common.machine()}
