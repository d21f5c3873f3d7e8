"""The engine core: scheduler and executor, one step at a time.

Each call of `step` starts what may be started and takes in one finished step. With asynchronous scheduling two steps are in
flight, so that planning overlaps execution. Knows nothing of text, users, processes or sockets.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.core.kv_planner import plan_kv_cache
from quire.core.output import SchedulerOutput
from quire.core.scheduler import Scheduler
from quire.engine.collector import CollectorPause
from quire.errors import CapacityError, ConfigError, EngineError, QuireError, RequestError
from quire.executor.interface import Executor
from quire.executor.selector import import_class, make_executor
from quire.logger import init_logger
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason, Refusal, SchedulerStats
from quire.timeline import STARTUP

logger = init_logger(__name__)

_SLEEPING_PARTS = ("weights", "kv_cache")

_MEMORY_TRIES = 5
"""Sizes of the cache that are tried while something else takes the device's memory: the last is two thirds of the first."""

_MAX_EMPTY_PLANS = 64
"""Plans without a token, nothing being in flight, after which the scheduler must be at fault."""


class EngineCore:
    """Runs requests.

    Args:
        config: the engine's.
        executor: who runs the steps; by default what the configuration names.

    Raises:
        ConfigError: the model cannot be loaded, or its cache does not fit.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        started = time.monotonic()
        STARTUP.begin_engine()
        self.config = config
        with CollectorPause():  # imports and models make a million objects that stay
            self._executor = executor if executor is not None else make_executor(config)
            try:
                self.kv_cache = self._allocate()
                self._scheduler = self._make_scheduler()
            except BaseException:
                self._executor.shutdown()
                raise
        self._depth = 2 if config.scheduler.async_scheduling else 1
        self._in_flight: deque[SchedulerOutput] = deque()
        self._news: list[EngineCoreOutput] = []
        self._asleep: set[str] = set()
        self._unfinished: set[str] = set()
        self._num_empty_plans = 0
        self._lost_some = False  # requests were aborted, and no step has told the figures since
        logger.info(
            "engine core ready in %.2f s: %d KV-cache pages of %d tokens",
            time.monotonic() - started,
            self.kv_cache.num_blocks - 1,
            self.kv_cache.block_size,
        )
        STARTUP.ready()
        logger.info("start: %s", STARTUP.line())

    def _allocate(self) -> KVCacheConfig:
        """Plan the pages and have them allocated: fewer where another process took memory since it was measured.

        Raises:
            ConfigError: not even few pages fit, or the size that the user named does not.
        """
        config, executor = self.config, self._executor
        available, why = executor.available_kv_bytes(), ""
        for _ in range(_MEMORY_TRIES):
            plan = plan_kv_cache(
                executor.kv_cache_specs(),
                available,
                config.cache,
                config.scheduler,
                max_model_len=config.model.max_model_len,
            )
            try:
                executor.initialize(plan)
                return plan
            except MemoryError as error:
                why = str(error)
            if config.cache.kv_cache_memory_bytes is not None:
                raise ConfigError(
                    f"kv_cache_memory_bytes={config.cache.kv_cache_memory_bytes} does not fit beside the weights: {why}",
                    setting="kv_cache_memory_bytes",
                )
            logger.warning("%d KV-cache pages do not fit any more, trying fewer: %s", plan.num_blocks, why)
            available = min(available * 9 // 10, executor.available_kv_bytes())
        raise ConfigError(
            f"the KV cache does not fit, however often its size was lowered ({why}): another process takes the device's "
            f"memory; name a size with kv_cache_memory_bytes",
            setting="gpu_memory_utilization",
        )

    def _make_scheduler(self) -> Scheduler:
        given = self.config.scheduler.scheduler_cls
        scheduler_class: Any = import_class(given, "scheduler_cls") if isinstance(given, str) else (given or Scheduler)
        return scheduler_class(
            self.config.scheduler, self.config.cache, self.kv_cache, max_model_len=self.config.model.max_model_len
        )

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Have it called, in any thread, when workers end by themselves while the core does nothing; `idle` then raises."""
        self._executor.on_failure = callback

    # --- requests ---

    def add_requests(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. One that is refused gets an error output of its own; the others are not harmed."""
        for request in requests:
            try:
                if self._asleep:
                    raise CapacityError("the engine sleeps; wake it up first (wake_up)")
                self._executor.check_request(request)
                self._scheduler.add_request(request)
                self._unfinished.add(request.request_id)
            except QuireError as error:
                self._refuse(request.request_id, error)

    def _refuse(self, request_id: str, error: QuireError) -> None:
        refusal: Refusal | None = None
        if isinstance(error, CapacityError):
            refusal = Refusal(is_capacity=True, retry_after=error.retry_after)
        elif isinstance(error, RequestError):
            refusal = Refusal(param=error.param)
        self._news.append(
            EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=str(error), refusal=refusal)
        )
        if refusal is None:
            logger.error("request %s could not be queued: %s", request_id, error)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests; whoever asks knows already, so no output tells of it. Unknown ids are ignored."""
        for output in self._scheduler.abort(request_ids):
            self._unfinished.discard(output.request_id)
            self._lost_some = True

    def has_work(self) -> bool:
        """Whether `step` would have anything to do."""
        return bool(self._news or self._in_flight or self._lost_some) or self._scheduler.has_unfinished()

    def step(self) -> EngineCoreOutputs:
        """Start what may be started, take in the oldest finished step; returns its news.

        Raises:
            EngineError: the executor failed. The core is of no use after that.
        """
        if not self._asleep:
            self._start_steps()
        if not self._in_flight:
            return self._with_news(EngineCoreOutputs(stats=self._gauges() if self._lost_some else None))
        self._scheduler.catch_up()  # The device works: the host has time.
        return self._with_news(self._take_in())

    def idle(self) -> bool:
        """Use a moment without work to prepare for later; true where another one could be used. See `Executor.idle`."""
        return not self._asleep and not self.has_work() and self._executor.idle()

    def _start_steps(self) -> None:
        scheduler, in_flight = self._scheduler, self._in_flight
        while len(in_flight) < self._depth and scheduler.has_unfinished():
            step = scheduler.schedule()
            if step.total_num_tokens == 0:
                self._check_progress()
                return
            self._num_empty_plans = 0
            self._executor.execute(step)
            in_flight.append(step)

    def _check_progress(self) -> None:
        """A plan may be empty now and then (everything was preempted), but not for ever."""
        self._num_empty_plans = 0 if self._in_flight else self._num_empty_plans + 1
        if self._num_empty_plans > _MAX_EMPTY_PLANS:
            stats = self._scheduler.stats()
            raise EngineError(
                f"the scheduler plans nothing, with {stats.num_running} requests running, {stats.num_waiting} waiting and "
                f"{stats.num_free_blocks} of {stats.num_total_blocks} pages free"
            )

    def _take_in(self) -> EngineCoreOutputs:
        result = self._executor.collect()
        self._lost_some = False
        outputs = self._scheduler.update(self._in_flight.popleft(), result)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._unfinished.discard(output.request_id)
        if self.config.cache.enable_kv_events:
            self._scheduler.drain_kv_events()
        return outputs

    def _gauges(self) -> SchedulerStats:
        """The figures of now without a step, which would have told them: who was aborted neither runs nor waits."""
        self._lost_some = False
        now = self._scheduler.stats()
        return SchedulerStats(
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            num_total_blocks=now.num_total_blocks,
            num_free_blocks=now.num_free_blocks,
        )

    def _with_news(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        if self._news:
            outputs.outputs = [*self._news, *outputs.outputs]
            self._news = []
        return outputs

    # --- utilities ---

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix."""
        self._scheduler.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: level 1 the pages, level 2 the weights too. Unfinished requests are aborted."""
        if level not in (1, 2):
            raise RequestError(f"level is {level}; it may be 1 (drop pages) or 2 (drop weights too)", param="level")
        while self._in_flight:
            outputs = self._take_in()
            self._news += [
                EngineCoreOutput(core_id, [token_id])
                for core_id, token_id in zip(outputs.plain_ids, outputs.plain_tokens, strict=True)
            ]
            self._news += outputs.outputs
        self._lost_some = bool(self._unfinished)
        self._news += self._scheduler.abort(sorted(self._unfinished))
        self._unfinished.clear()
        self._scheduler.reset_prefix_cache()
        self._executor.sleep(level)
        self._asleep = set(_SLEEPING_PARTS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`, all of it or only `weights` or `kv_cache`."""
        unknown = set(tags or ()) - set(_SLEEPING_PARTS)
        if unknown:
            raise RequestError(f"tags has {sorted(unknown)}; it may have {', '.join(_SLEEPING_PARTS)}", param="tags")
        self._executor.wake_up(tags)
        self._asleep -= set(tags) if tags is not None else set(_SLEEPING_PARTS)

    def is_sleeping(self) -> bool:
        """Whether anything sleeps still."""
        return bool(self._asleep)

    def stats(self) -> SchedulerStats:
        """Figures of now; counters since the start."""
        return self._scheduler.stats()

    def inspect(self) -> dict[str, Any]:
        """The scheduler's state, its last steps, live and finished requests; see `core/inspection.py`."""
        return self._scheduler.inspection.state()

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """What happened to a request; None where it is not remembered."""
        return self._scheduler.inspection.timeline(request_id)

    def explain(self) -> dict[str, Any]:
        """What was chosen and why."""
        return {
            **self._executor.explain(),
            "startup": STARTUP.report(),
            "num_kv_blocks": self.kv_cache.num_blocks,
            "kv_block_size": self.kv_cache.block_size,
            "kv_groups": [
                {"kind": group.spec.kind.value, "layers": len(group.layers), "window": group.spec.window}
                for group in self.kv_cache.groups
            ],
        }

    def collective_rpc(
        self, method: str, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker."""
        return self._executor.collective_rpc(method, tuple(args or ()), kwargs)

    def shutdown(self) -> None:
        """Release everything; may be called twice."""
        self._in_flight.clear()
        self._executor.shutdown()
