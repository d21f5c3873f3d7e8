"""`python -m bench copies`: output tokens a second of two copies of an engine core beside one (`--data-parallel-size`).

The model computes nothing and takes a fixed time for each step, as a device beside the host does: so the ratio shows what the
frontend, the choice of a copy and the copies' own host work leave of two devices. Rounds alternate.
"""

import argparse
import asyncio
import dataclasses
import statistics
import time
from typing import Any

from bench.tables import print_records
from tests.engine.builders import make_config
from tests.oracles.hash_model import HashExecutor

from quire.benchmarks import common
from quire.core.output import ModelRunnerOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.input_processor import TokenizedPrompt
from quire.sampling_params import RequestOutputKind, SamplingParams

STEP_S = 0.020


class WaitingExecutor(HashExecutor):
    """A hash model whose step takes `STEP_S`."""

    def collect(self) -> ModelRunnerOutput:
        began = time.perf_counter()
        result = super().collect()
        time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
        return result


async def _measure(num_copies: int, requests: int, tokens: int) -> float:
    config = make_config(
        max_model_len=2000, num_blocks=20_000, max_num_seqs=16, executor="bench.copies:WaitingExecutor", recovery=True
    )
    parallel = dataclasses.replace(config.parallel, data_parallel_size=num_copies)
    engine = AsyncLLM.from_engine_config(dataclasses.replace(config, parallel=parallel))
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def one(number: int) -> int:
        count = 0
        async for output in engine.generate(TokenizedPrompt([5, number % 400, 7]), params, str(number)):
            count = len(output.outputs[0].token_ids)
        return count

    try:
        await asyncio.gather(*(one(-number - 1) for number in range(8)))
        began = time.perf_counter()
        total = sum(await asyncio.gather(*(one(number) for number in range(requests))))
        return total / (time.perf_counter() - began)
    finally:
        engine.shutdown()


def run(rounds: int = 3, requests: int = 128, tokens: int = 60) -> dict[str, Any]:
    """Tokens a second of one copy and of two, by round, and the ratio of their medians."""
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        one = asyncio.run(_measure(1, requests, tokens))
        two = asyncio.run(_measure(2, requests, tokens))
        rows.append({"round": number, "one": one, "two": two, "ratio": two / one})
    return {"step_ms": 1e3 * STEP_S, "rows": rows, "median_ratio": statistics.median(row["ratio"] for row in rows)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of one copy and of two each")
    parser.add_argument("--requests", type=int, default=128, help="requests, all at once")
    parser.add_argument("--tokens", type=int, default=60, help="tokens an answer")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    result = run(args.rounds, args.requests, args.tokens)
    columns = {"round": "round", "one copy": "one", "two copies": "two", "ratio": "ratio"}
    print_records("Tokens a second", columns, result["rows"])
    print(f"median ratio: {result['median_ratio']:.3f}")
    return result | {"machine": common.machine()}
