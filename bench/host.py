"""`python -m bench host`: the engine's own thread around the device's work: microseconds a step and a request, by stage.

An `LLM` runs over an executor that computes nothing: what is left is planning, bookkeeping, the way of a request in and out,
and text. Two steps are in flight, as on a GPU. Times are this thread's CPU time less what the measuring itself takes: the
host never waits here, so that is what it takes on a quiet machine. The worker's own part (input preparation, launches) is
not in it: see `python -m bench step`.
"""

import argparse
import dataclasses
import gc
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench.stand_in import BLOCK_SIZE, byte_letters, engine_config
from bench.stand_in import write_tokenizer as write_vocabulary
from bench.tables import print_records

from quire.benchmarks import common
from quire.config import EngineConfig, SchedulerConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.engine.arg_parser import flag, positive
from quire.executor.interface import Executor

VOCAB_SIZE = 151_936
LONELY_RUNS = 40
"""Runs for one token that a small batch is measured with besides: each is well under a millisecond."""

STAGES = {
    "tokenize": ("prompts checked", "input_processor", "tokenize_batch"),
    "process": ("requests made", "input_processor", "process"),
    "add": ("requests queued", "", "add_processed"),
    "schedule": ("schedule", "_client.core._scheduler", "schedule"),
    "update": ("update", "_client.core._scheduler", "update"),
    "outputs": ("output processor", "_outputs", "process"),
}
"""Stage → what it is called, where it lives below `LLMEngine`, and the method."""


class NullExecutor(Executor):
    """Answers every step at once with one token a row; keeps the time that passes outside of it.

    Attributes:
        outside: CPU seconds between leaving it and entering it again, summed over each step up to its collection.
        num_new: requests that each of these steps admitted.
        began: when the first step of a run was started; `ended`: when the last one was collected. CPU seconds.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._tokens = np.random.default_rng(0).integers(1000, config.model.vocab_size, 1 << 16).astype(np.int32)
        self._num_tokens = 0
        self.reset()

    def reset(self) -> None:
        """A new run begins."""
        self.outside: list[float] = []
        self.num_new: list[int] = []
        self.began = self.ended = 0.0
        self._sum = 0.0
        self._left = time.thread_time()

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [KVCacheSpec(kind=KVKind.FULL, block_size=BLOCK_SIZE, bytes_per_token=1)]

    def available_kv_bytes(self) -> int:
        return 1 << 30

    def initialize(self, kv_cache: KVCacheConfig) -> None:
        """There is no cache."""

    def execute(self, step: SchedulerOutput) -> None:
        entered = time.thread_time()
        self._sum += entered - self._left
        self.began = self.began or entered
        self._in_flight.append(step)
        self._left = time.thread_time()

    def collect(self) -> ModelRunnerOutput:
        entered = time.thread_time()
        self.outside.append(self._sum + entered - self._left)
        self._sum = 0.0
        step = self._in_flight.popleft()
        self.num_new.append(len(step.new_requests))
        rows = step.rows[step.needs_sample]
        start = self._num_tokens % (len(self._tokens) - 4096)
        self._num_tokens += len(rows)
        result = ModelRunnerOutput(step.step_id, rows, self._tokens[start : start + len(rows)].copy(), step_ms=1.0)
        self.ended = self._left = time.thread_time()
        return result


def build_llm(
    tokenizer: Path | None, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int = 8192
) -> tuple[Any, NullExecutor]:
    """An offline engine over the null executor, with the settings of a GPU; text only where there is a tokenizer."""
    from quire import LLM
    from quire.engine.llm_engine import LLMEngine

    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=True,
    )
    config = engine_config(
        "null", tokenizer, {"vocab_size": VOCAB_SIZE}, scheduler, num_blocks=200_000, disable_log_stats=True
    )
    executor = NullExecutor(config)
    llm = LLM._from_engine(LLMEngine(config, executor=executor))
    return llm, executor


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer with as many tokens as a large model's: strings of one to three letters."""
    letters = byte_letters()
    pieces = letters + [first + second for first in letters for second in letters]
    pieces += [a + b + c for a in letters[:54] for b in letters[:54] for c in letters[:54]]
    return write_vocabulary(
        folder, {piece: index for index, piece in enumerate(dict.fromkeys(pieces)) if index < VOCAB_SIZE}
    )


@dataclasses.dataclass
class _Stage:
    seconds: float = 0.0
    calls: int = 0


def _time_stages(engine: Any) -> tuple[dict[str, _Stage], Callable[[], None]]:
    """Put a stopwatch around each stage's method. Returns the stopwatches, and what takes them off."""
    stages = {name: _Stage() for name in STAGES}
    undo: list[tuple[Any, str]] = []
    for name, (_, path, method) in STAGES.items():
        owner = engine
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part)
        setattr(owner, method, _timed(getattr(owner, method), stages[name]))
        undo.append((owner, method))

    def take_off() -> None:
        for owner, method in undo:
            delattr(owner, method)

    return stages, take_off


def _timed(method: Callable[..., Any], stage: _Stage) -> Callable[..., Any]:
    clock = time.thread_time

    def call(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return method(*args, **kwargs)
        finally:
            stage.seconds += clock() - start
            stage.calls += 1

    return call


def measure(
    llm: Any, executor: NullExecutor, batch: int, prompt_len: int, output_len: int, runs: int
) -> dict[str, Any]:
    """One case: `batch` requests at once, `runs` times.

    Returns:
        `step_us`: median, mean and 99th percentile of a decode step. `first_us`: from the call to the first step's start,
        `last_us`: from the last step's collection to the return; `alone_us`: the same requests for one token, in all, a
        request; `stages_us`: mean microseconds of a stage, a step or a request.
    """
    from quire import SamplingParams

    params = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.0)
    one = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
    clock = time.thread_time
    steps: list[float] = []
    first: list[float] = []
    last: list[float] = []
    alone: list[float] = []

    def prompts(seed: int) -> list[Any]:
        draw = np.random.default_rng([seed, batch, prompt_len])
        tokens = draw.integers(common.LOWEST_TOKEN, VOCAB_SIZE, (batch, prompt_len)).tolist()
        return [{"prompt_token_ids": ids} for ids in tokens]

    def run(given: list[Any], sampling: SamplingParams) -> tuple[float, float]:
        executor.reset()
        start = clock()
        outputs = llm.generate(given, sampling, use_tqdm=False)
        end = clock()
        del outputs  # what it costs to forget them is the caller's
        return start, end

    run(prompts(0), params)
    for seed in range(1, runs + 1):
        given = prompts(seed)
        gc.collect()
        start, end = run(given, params)
        first.append(executor.began - start)
        last.append(end - executor.ended)
        admitted = max(index for index, count in enumerate(executor.num_new) if count)
        steps += executor.outside[admitted + 3 : -2]
    for seed in range(runs + 1, 2 * runs + 1 + LONELY_RUNS // batch):
        start, end = run(prompts(seed), one)
        alone.append(end - start)
    stages, take_off = _time_stages(llm.llm_engine)
    run(prompts(-1 % (1 << 31)), params)
    take_off()
    steps_run = len(executor.outside)
    per = {"tokenize": batch, "process": batch, "add": batch, "schedule": steps_run, "update": steps_run}
    return {
        "batch": batch,
        "prompt_len": prompt_len,
        "output_len": output_len,
        "step_us": {
            "median": statistics.median(steps) * 1e6,
            "mean": statistics.mean(steps) * 1e6,
            "p99": common.percentile(steps, 99) * 1e6,
        },
        "first_us": statistics.median(first) * 1e6,
        "last_us": statistics.median(last) * 1e6,
        "alone_us": statistics.median(alone) * 1e6 / batch,
        "stages_us": {name: stage.seconds * 1e6 / per.get(name, steps_run) for name, stage in stages.items()},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 32, 256, 1000], help="requests")
    parser.add_argument("--input-lens", type=positive, nargs="+", default=[128, 1000], help="tokens a prompt")
    flag(parser, "--output-len", 256, "tokens an answer")
    flag(parser, "--max-num-batched-tokens", 16384, "tokens a step (16,384)")
    flag(parser, "--runs", 3, "runs of each case")
    flag(parser, "--disable-detokenize", False, "make no text of the tokens")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = None if args.disable_detokenize else write_tokenizer(Path(folder))
        longest = max(8192, max(args.input_lens) + args.output_len)
        llm, executor = build_llm(tokenizer, max(args.batch_sizes), args.max_num_batched_tokens, longest)
        try:
            rows = [
                measure(llm, executor, batch, prompt_len, args.output_len, args.runs)
                for prompt_len in args.input_lens
                for batch in args.batch_sizes
            ]
        finally:
            llm.shutdown()
    case = {"requests": "batch", "prompt": "prompt_len"}
    steps = {"step µs": "step_us.median", "mean": "step_us.mean", "p99": "step_us.p99"}
    rest = {"before first step, µs": "first_us", "after last step, µs": "last_us", "alone, µs": "alone_us"}
    print_records("Host: CPU time of the engine's thread", {**case, **steps, **rest}, rows)
    stages = {about: f"stages_us.{name}" for name, (about, _, _) in STAGES.items()}
    print_records("Stages, µs: a request for the first three, a step for the others", {**case, **stages}, rows)
    return {"rows": rows, "machine": common.machine()}
