"""`python -m bench scheduler`: what planning costs. Microseconds a request and step for `schedule` + `update` while decoding.

No model runs: a step's result is made up outside the measured time. The rows show that the cost is linear in the
requests that are scheduled, and does not grow with those that wait or with the length of their contexts. Times are this
thread's CPU time: planning never blocks, so that is what it takes on a quiet machine, and it is the same on a busy one.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from bench.tables import print_records

from quire.benchmarks import common
from quire.config import CacheConfig, SchedulerConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind, group_layers
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.core.scheduler import Scheduler
from quire.request import EngineRequest, token_array
from quire.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
EOS = 2


def run(
    num_running: Sequence[int] = (256, 1024),
    waiting: int = 10_000,
    context: int = 100_000,
    steps: int = 400,
    asynchronous: bool = True,
) -> list[dict[str, Any]]:
    """A row for each case: name, running, waiting, context, and µs a request and step.

    Args:
        num_running: numbers of decoding requests.
        waiting: requests that wait, in the case that has any.
        context: tokens of each request's context, in the case of long ones.
        steps: measured steps a case.
        asynchronous: measure planning one step ahead as well.
    """
    rows: list[dict[str, Any]] = []
    for count in num_running:
        cases = [("decode", 0, PROMPT_TOKENS, 1)]
        cases += [("decode, one step ahead", 0, PROMPT_TOKENS, 2)] if asynchronous else []
        cases += [(f"{waiting} waiting", waiting, PROMPT_TOKENS, 1)] if waiting else []
        # Long contexts share one prompt's pages, so that setting them up takes seconds and not minutes.
        cases += [(f"context of {context}", 0, context, 1)] if context > PROMPT_TOKENS else []
        for name, num_waiting, length, depth in cases:
            if sys.stderr.isatty():
                print(f"{count} running, {name} ...", file=sys.stderr)
            rows.append(_measure(name, count, num_waiting, length, steps, depth))
    return rows


def _measure(name: str, running: int, waiting: int, context: int, steps: int, depth: int) -> dict[str, Any]:
    scheduler = _build(running, context, steps + 64)
    prompt = list(range(1000, 1000 + context))
    pending: list[SchedulerOutput] = []
    for index in range(running):
        scheduler.add_request(_request(index, prompt, steps))
        if index == 0:
            while _step(scheduler, pending, depth=1)[2] != 1:  # The first computes the prompt that all share.
                pass
    while scheduler.num_waiting:
        _step(scheduler, pending, depth=1)
    for index in range(waiting):
        scheduler.add_request(_request(running + index, prompt, steps))
    for _ in range(32):
        _step(scheduler, pending, depth)
    gc.collect()
    samples = [_step(scheduler, pending, depth) for _ in range(steps)]
    scale = 1e6 / running
    return {
        "case": name,
        "running": running,
        "waiting": waiting,
        "context": context,
        "us_per_request_step": statistics.mean(plan + take for plan, take, _ in samples) * scale,
        "median_us": statistics.median(plan + take for plan, take, _ in samples) * scale,
        "schedule_us": statistics.mean(plan for plan, _, _ in samples) * scale,
        "update_us": statistics.mean(take for _, take, _ in samples) * scale,
        "step_us": statistics.mean(plan + take for plan, take, _ in samples) * 1e6,
    }


def _build(running: int, context: int, steps: int) -> Scheduler:
    spec = KVCacheSpec(kind=KVKind.FULL, block_size=BLOCK_SIZE, bytes_per_token=1)
    pages = -(-context // BLOCK_SIZE) + running * (-(-(steps + 160) // BLOCK_SIZE) + 2) + 64
    config = SchedulerConfig(
        max_num_batched_tokens=max(2048, running * 2),
        max_num_seqs=running,
        max_model_len=context + steps + 128,
        max_num_waiting=1 << 20,
        max_waiting_tokens=1 << 40,
    )
    return Scheduler(config, CacheConfig(block_size=BLOCK_SIZE), KVCacheConfig(pages, group_layers([spec])))


def _request(index: int, prompt: list[int], steps: int) -> EngineRequest:
    params = SamplingParams(max_tokens=steps + 96, eos_token_ids=[EOS])
    return EngineRequest(
        request_id=f"request-{index}", prompt_token_ids=token_array(prompt), sampling_params=params, seed=index
    )


def _step(scheduler: Scheduler, pending: list[SchedulerOutput], depth: int) -> tuple[float, float, int]:
    """One turn of the engine's loop. Returns seconds of `schedule`, of `update` with publication, and tokens scheduled."""
    start = time.thread_time()
    step = scheduler.schedule()
    planned = time.thread_time() - start
    pending.append(step)
    taken = 0.0
    while len(pending) >= depth:
        oldest = pending.pop(0)
        result = _made_up_result(oldest)
        start = time.thread_time()
        scheduler.catch_up()
        scheduler.update(oldest, result)
        taken += time.thread_time() - start
    return planned, taken, step.total_num_tokens


def _made_up_result(step: SchedulerOutput) -> ModelRunnerOutput:
    rows = step.rows[step.needs_sample]
    return ModelRunnerOutput(step_id=step.step_id, rows=rows, token_ids=np.full(len(rows), 7, np.int32), step_ms=1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-running", type=int, nargs="+", default=[256, 1024], help="decoding requests")
    parser.add_argument("--waiting", type=int, default=10_000, help="requests that wait, in the case that has any")
    parser.add_argument("--context", type=int, default=100_000, help="context tokens, in the case of long ones")
    parser.add_argument("--steps", type=int, default=400, help="measured steps a case")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    rows = run(tuple(args.num_running), args.waiting, args.context, args.steps)
    columns = {
        "case": "case",
        "running": "running",
        "µs/request": "us_per_request_step",
        "median": "median_us",
        "schedule": "schedule_us",
        "update": "update_us",
        "step µs": "step_us",
    }
    print_records("Scheduler: CPU time of a request and step", columns, rows)
    return {"steps": args.steps, "rows": rows, "machine": common.machine()}
