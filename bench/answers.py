"""`python -m bench answers`: how long the making of a long answer keeps other requests waiting, in pieces and in one go.

No server runs: answers are written into nothing, beside a task that looks how much processor time it was kept waiting.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from bench.tables import print_records
from starlette.responses import Response

from quire.benchmarks.common import machine
from quire.engine.arg_parser import flag
from quire.entrypoints.http.long_bodies import encode, json_response
from quire.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs_json
from quire.entrypoints.pooling_api.pooling_protocol import PoolingData, PoolingResponse, PoolingUsage
from quire.logprobs import Logprob

Makers = dict[str, Callable[[bool], Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--tokens", 3000, "tokens of an answer")
    flag(parser, "--width", 1024, "numbers of a vector")
    flag(parser, "--entries", 20, "logprobs of a token")
    flag(parser, "--rounds", 5, "each answer is made so often; the best counts")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    rows = asyncio.run(_measure(_answers(args), args.rounds))
    columns = {"answer": "answer", "MB": "megabytes", "way": "way", "longest, ms": "longest_ms", "all, ms": "total_ms"}
    print_records("Long answers", columns, rows)
    return {"results": rows, "tokens": args.tokens, "width": args.width, "entries": args.entries, "machine": machine()}


def _answers(args: argparse.Namespace) -> Makers:
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((args.tokens, args.width)).astype(np.float32)
    ids = draw.integers(0, 150_000, (args.tokens, args.entries)).tolist()
    positions = [
        {token: Logprob(-0.1 - rank, rank + 1, f"word{rank}") for rank, token in enumerate(row)} for row in ids
    ]

    def pooled(whole: bool) -> PoolingResponse:
        data = PoolingData(0, vectors.tolist() if whole else vectors)  # type: ignore[arg-type]
        return PoolingResponse(id="x", created=1, model="m", usage=PoolingUsage(1, 1), data=[data])

    def of_prompt(whole: bool) -> dict[str, Any]:
        made = prompt_logprobs_json([None, *positions])
        return {"prompt_logprobs": list(made) if whole else made}

    def of_chat(whole: bool) -> dict[str, Any]:
        made = chat_logprobs([row[0] for row in ids], positions, args.entries, as_ids=False).content
        return {"choices": [{"logprobs": {"content": list(made) if whole else made}}]}

    return {"vectors of tokens": pooled, "prompt logprobs": of_prompt, "logprobs of a chat answer": of_chat}


async def _measure(makers: Makers, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, make in makers.items():
        for way in ("in one go", "in pieces"):
            tries = [await _one(make, way == "in one go") for _ in range(rounds)]
            longest, total = (min(values) * 1e3 for values in list(zip(*tries, strict=True))[:2])
            row = {"answer": name, "way": way, "longest_ms": longest, "total_ms": total}
            rows.append({**row, "megabytes": tries[0][2] / 1e6})
    return rows


async def _one(make: Callable[[bool], Any], whole: bool) -> tuple[float, float, int]:
    """Seconds of processor time: the longest that another task was kept waiting, and all; and the bytes."""
    gaps, sent = [0.0], [0]

    async def others() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            gaps.append(now - last)
            last = now

    async def send(message: Any) -> None:
        sent[0] += len(message.get("body", b""))

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    task = asyncio.create_task(others())
    await asyncio.sleep(0)
    began = time.thread_time()
    response = Response(encode(make(True))) if whole else json_response(make(False))
    await response({"type": "http"}, receive, send)
    total = time.thread_time() - began
    await asyncio.sleep(0)
    task.cancel()
    return max(gaps), total, sent[0]
