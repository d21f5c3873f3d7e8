"""The smallest engine: scheduler and executor in a loop, for tests that look at tokens."""

from collections import deque
from pathlib import Path
from typing import Any

from quire.core.kv_planner import plan_kv_cache
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.core.scheduler import Scheduler
from quire.engine.arg_utils import EngineArgs
from quire.executor import make_executor
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest
from quire.sampling_params import SamplingParams


class TinyEngine:
    """Runs requests to their end.

    Args:
        path: a checkpoint.
        depth: steps in flight at once (2: asynchronous scheduling).
        engine_args: as `EngineArgs` takes them.
    """

    def __init__(self, path: Path, *, depth: int = 1, **engine_args: Any) -> None:
        settings: dict[str, Any] = {
            "model": str(path), "dtype": "float32", "max_model_len": 200, "max_num_seqs": 8, "block_size": 4,
            "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True,
            "async_scheduling": depth > 1,
        }  # fmt: skip
        self.config = EngineArgs(**(settings | engine_args)).create_engine_config()
        self.executor = make_executor(self.config)
        self.depth = depth
        self.initialize()
        self.steps: list[SchedulerOutput] = []
        self.raw: list[ModelRunnerOutput] = []

    def initialize(self) -> None:
        """Plan the pages and make a scheduler."""
        kv_config = plan_kv_cache(
            self.executor.kv_cache_specs(),
            self.executor.available_kv_bytes(),
            self.config.cache,
            self.config.scheduler,
            max_model_len=self.config.model.max_model_len,
        )
        self.executor.initialize(kv_config)
        self.scheduler = Scheduler(
            self.config.scheduler, self.config.cache, kv_config, max_model_len=self.config.model.max_model_len
        )

    def generate(self, requests: list[EngineRequest]) -> dict[str, list[int]]:
        """Each request's tokens."""
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self.news: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.scheduler.add_request(request)
        in_flight: deque[SchedulerOutput] = deque()
        while self.scheduler.has_work():
            step = self.scheduler.schedule() if len(in_flight) < self.depth else None
            if step is not None and step.total_num_tokens:
                self.steps.append(step)
                self.executor.execute(step)
                in_flight.append(step)
                if len(in_flight) < self.depth:
                    continue
            assert in_flight, "the scheduler has work but plans nothing"
            self.scheduler.catch_up()
            output = self.executor.collect()
            self.raw.append(output)
            self._take(self.scheduler.update(in_flight.popleft(), output), tokens)
        return tokens

    def _take(self, outputs: EngineCoreOutputs, tokens: dict[str, list[int]]) -> None:
        for request_id, token in zip(outputs.plain_ids, outputs.plain_tokens, strict=True):
            tokens[request_id].append(token)
        for output in outputs.outputs:
            tokens[output.request_id] += output.new_token_ids
            self.news[output.request_id].append(output)


def make_request(name: str, prompt: list[int], *, seed: int = 0, **params: Any) -> EngineRequest:
    """A request that generates to its limit unless told otherwise; greedy by default."""
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**(settings | params)),
        seed=seed,
    )
