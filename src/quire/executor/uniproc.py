"""One worker in this process: the executor for a single device.

Where the device works beside the host a step is submitted when it is started, and `collect` waits for it; elsewhere it runs
at once. Knows nothing of tensors or models.
"""

import concurrent.futures
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.errors import EngineError
from quire.executor import wire
from quire.executor.host_network import rank_process
from quire.executor.interface import Executor, find_method
from quire.executor.selector import make_worker
from quire.patch import bootstrap, settle
from quire.request import EngineRequest

if TYPE_CHECKING:
    from quire.worker.runner import PendingStep  # which imports torch


class UniprocExecutor(Executor):
    """Runs steps on a worker that it makes itself (the platform's, or `worker_cls`)."""

    def __init__(self, config: EngineConfig) -> None:
        bootstrap("worker")
        settle(config)
        super().__init__(config)
        self._results: deque[ModelRunnerOutput | PendingStep] = deque()
        self._preparing: dict[str, concurrent.futures.Future[Any]] = {}
        self._problems: dict[str, str] = {}
        if config.parallel.sharing is not None:  # this process is a rank of a group
            for name, value in rank_process(config, 0).environment.items():
                envs.set_default(name, value)
        self._worker = make_worker(config)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._worker.kv_cache_specs()

    def available_kv_bytes(self) -> int:
        return self._worker.available_kv_bytes()

    def initialize(self, kv_cache: KVCacheConfig) -> None:
        self._worker.initialize(kv_cache)

    def execute(self, step: SchedulerOutput) -> None:
        self._results.append(self._worker.execute(step))

    def collect(self) -> ModelRunnerOutput:
        if not self._results:
            raise EngineError("collect() without a step in flight")
        result = self._results.popleft()
        return result if isinstance(result, ModelRunnerOutput) else result.result()

    def is_prepared(self, request: EngineRequest) -> bool:
        return self._worker.is_prepared(request.sampling_params)

    def _begin(self, request: EngineRequest, what: wire.Preparation) -> None:
        self._preparing[request.request_id] = wire.begin(self._worker, what)

    def problems(self) -> dict[str, str]:
        problems, self._problems = self._problems, {}
        return problems

    def prepared(self, wait_s: float) -> list[str]:
        preparing = self._preparing
        if wait_s and not any(future.done() for future in preparing.values()):
            concurrent.futures.wait(preparing.values(), wait_s, concurrent.futures.FIRST_COMPLETED)
        done = [request_id for request_id, future in preparing.items() if future.done()]
        for request_id in done:
            if (problem := wire.describe_failure(preparing.pop(request_id))) is not None:
                self._problems[request_id] = problem
        return done

    def encodes_beside(self) -> bool:
        return self._worker.encodes_beside()

    def prepare_to_serve(self, wait: bool = False) -> None:
        self._worker.prepare_to_serve(wait)

    def idle(self) -> bool:
        return self._worker.idle()

    def sleep(self, level: int = 1) -> None:
        self._worker.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._worker.wake_up(tags)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        if callable(method):
            return [method(self._worker, *args, **(kwargs or {}))]
        return [find_method(self._worker, method)(*args, **(kwargs or {}))]

    def explain(self) -> dict[str, Any]:
        return self._worker.explain()

    def shutdown(self) -> None:
        self._results.clear()
        self._worker.shutdown()
