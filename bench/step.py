"""`python -m bench step`: one decode step at several batch sizes: where its time goes, and how near it is to the machine's limit.

Bytes are those that a step cannot avoid: each weight once, and the keys and values of every running request. The share of the
measured read bandwidth is the figure that travels between machines.
"""

import argparse
import os
import threading
import time
from typing import Any

import numpy as np
from bench.tables import print_records

from quire.benchmarks import common
from quire.engine.arg_parser import flag, positive
from quire.request import SchedulerStats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", default=[1, 8, 32], help="requests that decode (1 8 32)"
    )
    flag(parser, "--input-len", 128, "tokens a prompt")
    flag(parser, "--num-steps", 64, "steps that are measured")
    flag(parser, "--bench-seed", 0, "seed of the prompts")
    common.add_engine_arguments(parser)


class _StepClock:
    """Receives each step's figures from the engine."""

    def __init__(self) -> None:
        self.last: SchedulerStats | None = None

    def record_step(self, stats: SchedulerStats) -> None:
        self.last = stats

    def record_first_token(self, seconds_since_arrival: float, num_prompt_tokens: int) -> None:
        pass

    def record_next_tokens(self, seconds: float, count: int = 1, times: int = 1) -> None:
        pass

    def record_finished(self, request: Any) -> None:
        pass


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    from quire.engine.arg_resolve import UsageContext
    from quire.engine.arg_utils import EngineArgs
    from quire.engine.llm_engine import LLMEngine

    clock = _StepClock()
    engine = LLMEngine.from_engine_args(
        EngineArgs.from_cli_args(args), UsageContext.LLM_CLASS, stat_loggers=[clock], enable_multiprocessing=False
    )
    config = engine.config
    work = step_work(config)
    threads = config.device.cpu_threads or len(os.sched_getaffinity(0))
    device_bandwidth = float(engine.collective_rpc("bandwidth")[0])
    memory = None if device_bandwidth else ReadBandwidth(threads)
    rows: list[dict[str, Any]] = []
    for batch in common.progress(args.batch_sizes, len(args.batch_sizes), "batch sizes"):
        before = memory.measure() if memory else device_bandwidth
        figures = _measure(engine, clock, args, batch)
        bandwidth = max(before, memory.measure() if memory else float(engine.collective_rpc("bandwidth")[0]))
        rows.append(_row(figures, work, batch, args, bandwidth))
    columns = {
        "batch": "batch",
        "step ms": "step_ms",
        "device ms": "device_ms",
        "host ms": "host_ms",
        "MB read": "mb",
        "GB/s": "gb_per_second",
        "of memory": "share",
        "GFLOP": "gflop",
        "GFLOP/s": "gflop_per_second",
    }
    title = f"A decode step: {config.model.model} ({config.model.dtype}), {threads} threads, medians"
    print_records(title, columns, [{**row, "share": f"{row['share']:.0%}"} for row in rows])
    return {
        "model": common.model_name(config.model.model),
        "dtype": config.model.dtype,
        "rows": rows,
        "machine": common.machine(),
    }


def step_work(config: Any) -> dict[str, float]:
    """What a step must move and compute, from the model's own numbers; no weights are read for this."""
    from quire.platforms import current_platform
    from quire.worker.dry_run import explain_without_weights

    numbers = explain_without_weights(config, current_platform(config.device.device))["model"]
    embedding = numbers["vocab"] * numbers["hidden"]
    is_tied = bool(config.model.hf_config.get("tie_word_embeddings", False))
    # An untied embedding table is only looked into; a tied one is read whole as the output layer.
    unread = 0 if is_tied else embedding
    per_parameter = numbers["weight_bytes"] / numbers["parameters"]
    return {
        "weight_bytes": numbers["weight_bytes"] - unread * per_parameter,
        "kv_bytes_per_token": numbers["kv_bytes_per_token"],
        "flops_per_token": 2.0 * (numbers["parameters"] - unread),
    }


def _measure(engine: Any, clock: _StepClock, args: argparse.Namespace, batch: int) -> dict[str, list[float]]:
    """Decode steps of `batch` requests: seconds in the engine, and milliseconds on the device."""
    from quire import SamplingParams

    vocab = engine.config.model.vocab_size
    prompts = common.random_prompts(batch, [args.input_len] * batch, vocab, args.bench_seed + batch)
    params = SamplingParams(temperature=0.0, max_tokens=args.num_steps + 8, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"step-{batch}-{index}", {"prompt_token_ids": prompt}, params)
    whole: list[float] = []
    device: list[float] = []
    waits: list[float] = []
    waited = engine.collective_rpc("waited_seconds")[0]
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began
        before, waited = waited, engine.collective_rpc("waited_seconds")[0]
        stats = clock.last
        if stats is not None and stats.num_batched_tokens == batch and stats.num_running == batch:
            whole.append(seconds * 1000)
            device.append(stats.step_ms)
            waits.append((waited - before) * 1000)
    return {"whole": whole[4:], "device": device[4:], "waits": waits[4:]}


def _row(
    figures: dict[str, list[float]], work: dict[str, float], batch: int, args: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    step_ms = common.percentile(figures["whole"], 50)
    device_ms = common.percentile(figures["device"], 50)
    # A device beside the host works while the host plans: the host's own time is what it did not spend waiting.
    waits_ms = common.percentile(figures["waits"], 50)
    host_ms = step_ms - (waits_ms if any(figures["waits"]) else device_ms)
    context = args.input_len + args.num_steps / 2
    moved = work["weight_bytes"] + batch * context * work["kv_bytes_per_token"]
    flops = batch * work["flops_per_token"]
    seconds = step_ms / 1000 or float("inf")
    return {
        "batch": batch,
        "step_ms": step_ms,
        "device_ms": device_ms,
        "host_ms": host_ms,
        "mb": moved / 1e6,
        "gb_per_second": moved / seconds / 1e9,
        "share": moved / seconds / bandwidth,
        "read_bandwidth_gb_per_second": bandwidth / 1e9,
        "gflop": flops / 1e9,
        "gflop_per_second": flops / seconds / 1e9,
        "num_steps": len(figures["whole"]),
    }


BUFFER_BYTES = 512 * 1024 * 1024
"""Far beyond any cache."""


class ReadBandwidth:
    """Reads one large buffer with several threads.

    Args:
        num_threads: as many as the engine computes with.
    """

    def __init__(self, num_threads: int, num_bytes: int = BUFFER_BYTES) -> None:
        self._parts = np.array_split(np.ones(num_bytes // 8, dtype=np.int64), max(1, num_threads))

    def measure(self, rounds: int = 5) -> float:
        """Bytes a second, the best of several rounds. An OR over 64-bit words: one load and one cheap operation each."""
        return max(self._one_round() for _ in range(rounds))

    def _one_round(self) -> float:
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in self._parts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(part.nbytes for part in self._parts) / (time.perf_counter() - began)
