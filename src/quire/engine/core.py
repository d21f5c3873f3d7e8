"""The engine core: scheduler and executor, one step at a time.

Each call of `step` starts what may be started and takes in one finished step. With asynchronous scheduling two steps are in
flight, so that planning overlaps execution. Knows nothing of text, users, processes or sockets.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.core.kv_planner import blocks_for_one_request, largest_model_len, plan_kv_cache
from quire.core.output import SchedulerOutput
from quire.core.preparations import Preparations
from quire.engine.collector import CollectorPause
from quire.engine.copy_turns import CopyTurns
from quire.engine.core_scheduler import make_scheduler
from quire.engine.core_verbs import AdapterVerbs, ProfileVerbs
from quire.engine.event_publisher import event_hooks
from quire.engine.heartbeat import Heartbeat
from quire.engine.hooks import CoreHooks, make_hooks
from quire.engine.messages import Ready, Standing, refusal_of
from quire.engine.pausing import Pause, PauseState, check_mode, is_named
from quire.engine.weights import BY_RPC, UTILITIES, WeightVerbs, fetch_missing_weights, restored, utility
from quire.errors import CapacityError, ConfigError, EngineError, QuireError, RequestError
from quire.executor.interface import Executor
from quire.executor.selector import make_executor
from quire.logger import init_logger
from quire.platforms import current_platform
from quire.plugins import load_general_plugins
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason, SchedulerStats, WeightState
from quire.timeline import STARTUP

logger = init_logger(__name__)

_SLEEPING_PARTS = ("weights", "kv_cache")
_WAKING_PARTS = (*_SLEEPING_PARTS, "scheduling")

_MEMORY_TRIES = 5
"""Sizes of the cache that are tried while something else takes the device's memory: the last is two thirds of the first."""

_LEAST_MODEL_LEN = 2
"""One token of a prompt and one of an answer: for less no cache is planned where the length is left open."""

_PREPARATION_WAIT_S = 0.002
"""How long a step waits for a grammar when there is nothing else to do, before messages are looked at again."""

_MAX_EMPTY_PLANS = 64
"""Plans without a token, nothing being in flight, after which the scheduler must be at fault."""


class EngineCore(WeightVerbs, ProfileVerbs, AdapterVerbs):
    """Runs requests.

    Args:
        config: the engine's.
        executor: runs the steps; by default the one that the configuration names.
        serves: requests of any kind will come one by one, and none may hold up the others: what the first request of a kind would
            wait for is prepared at the start.
        weights: those of a core in whose place this one is started.
        is_awaited: requests of a core that died wait already, so that what other requests would wait for is prepared beside them.

    Attributes:
        heartbeat: says what the core does. Who runs the core may put another one in its place.
        turns: steps with other copies that share experts.

    Raises:
        ConfigError: the model cannot be loaded, or its cache does not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        *,
        serves: bool = False,
        weights: WeightState | None = None,
        is_awaited: bool = False,
    ) -> None:
        started = time.monotonic()
        load_general_plugins("core")
        if weights is not None:
            config, weights = restored(config, weights)
        super().__init__(weights)
        AdapterVerbs.__init__(self)
        STARTUP.begin_engine()
        self.config = config
        self._platform = current_platform(config.device.device)
        self._hooks: list[CoreHooks] = []
        self.heartbeat = Heartbeat()
        if executor is None:
            fetch_missing_weights(config)
        with CollectorPause():  # imports and models make a million objects that stay
            self._executor = executor if executor is not None else make_executor(config)
            try:
                self._make_parts(serves=serves, is_awaited=is_awaited)
            except BaseException:
                self._executor.shutdown()
                raise
        self._depth = config.scheduler.depth
        self._in_flight: deque[SchedulerOutput] = deque()
        self._outputs: list[EngineCoreOutput] = []
        self._asleep: set[str] = set()
        self._sleep_level = 0
        self._pause = Pause()
        self.turns = CopyTurns(self._executor)
        self._num_empty_plans = 0
        self._lost_some = False  # requests were aborted, and no step has told the figures since
        self._has_dropped_weights = False
        self._tell_ready(started)

    def _tell_ready(self, started: float) -> None:
        logger.info(
            "engine core ready in %.2f s: %d KV-cache pages of %d tokens",
            time.monotonic() - started,
            self.kv_cache.num_blocks - 1,
            self.kv_cache.block_size,
        )
        STARTUP.ready()
        logger.info("start: %s", STARTUP.line())

    def _make_parts(self, *, serves: bool, is_awaited: bool) -> None:
        if serves:
            self._executor.prepare_to_serve()
        self.kv_cache = self._allocate()
        self.config = self._settle()
        lora = self.config.lora
        num_adapters = 0 if lora is None else lora.num_slots(self.config.scheduler.max_num_seqs)
        self._preparations = Preparations(self._executor, num_adapters)
        self._scheduler = make_scheduler(self.config, self.kv_cache, self._executor, self._preparations)
        if serves and not is_awaited:
            with STARTUP.phase("first sizes, vocabulary"):
                self._executor.prepare_to_serve(wait=True)
        own = event_hooks(self.config, self.kv_cache, self._scheduler.kv)
        self._hooks = make_hooks(self.config, self._platform, own)
        for hook in self._hooks:
            hook.ready(self)

    def _allocate(self) -> KVCacheConfig:
        """Plan the pages and have them allocated: fewer where another process took memory since it was measured.
        Raises ConfigError: not even few pages fit, or the size that the user named does not."""
        config, executor = self.config, self._executor
        available, why = executor.available_kv_bytes(), ""
        for _ in range(_MEMORY_TRIES):
            plan = plan_kv_cache(
                executor.kv_cache_specs(),
                available,
                config.cache,
                config.scheduler,
                max_model_len=_LEAST_MODEL_LEN if config.model.fits_max_model_len else config.model.max_model_len,
                group=self._platform.kv_groups,
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

    def _settle(self) -> EngineConfig:
        """The configuration with what is known now that the cache is there: its pages, and the length that fits in them where
        the user left that open."""
        config, pages = self.config, self.kv_cache
        length = config.model.max_model_len
        if config.model.fits_max_model_len:
            length = largest_model_len(pages.groups, pages.num_blocks, config.scheduler.max_open_tokens, length)
            logger.info("max_model_len is %d (the model allows %d)", length, config.model.max_model_len)
        needed = blocks_for_one_request(pages.groups, length, config.scheduler.max_open_tokens) - 1
        return config.settled(pages.num_blocks, pages.block_size, length, (pages.num_blocks - 1) / max(1, needed))

    def ready(self) -> Ready:
        """What frontends want to know of a core that serves."""
        concurrency = self.config.cache.kv_cache_max_concurrency or 0.0
        return Ready(self.kv_cache.num_blocks, self.kv_cache.block_size, self.config.model.max_model_len, concurrency)

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Have it called, in any thread, when workers end by themselves while the core does nothing; `idle` then raises."""
        self._executor.on_failure = callback

    # --- requests ---

    def add_requests(self, requests: Iterable[EngineRequest], *, again: bool = False) -> None:
        """Queue requests. One that is refused gets an error output of its own; the others are not harmed. With `again` another
        core had them: those that are here already are passed over, and a core that sleeps keeps them."""
        known = set(self._all_ids()) if again else ()
        for request in requests:
            if request.request_id in known:
                continue
            try:
                if self._asleep and not again:
                    raise CapacityError("the engine sleeps; wake it up first (wake_up)")
                self._check_weights()
                self._executor.check_request(request)
                self._preparations.transfers.check(request)
                self._settle_adapter(request)
                self._enter(request, again)
            except QuireError as error:
                self._refuse(request.request_id, error)

    def _enter(self, request: EngineRequest, again: bool = False) -> None:
        if self._pause.state is PauseState.DRAINING:
            self._pause.held[request.request_id] = request
        else:
            self._scheduler.add_request(request, again=again)

    def _refuse(self, request_id: str, error: QuireError) -> None:
        refusal = refusal_of(error)
        self._outputs.append(
            EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=str(error), refusal=refusal)
        )
        if refusal is None:
            logger.error("request %s could not be queued: %s", request_id, error)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests. No output is made for them, as the caller knows. Unknown ids are ignored."""
        request_ids = list(request_ids)
        self._pause.forget(request_ids)
        self._lost_some |= bool(self._scheduler.abort(request_ids))

    @utility
    def abort_named(self, request_ids: Sequence[str]) -> int:
        """End requests of every frontend, by the ids that a server's clients know; returns how many sequences that were."""
        found = [core_id for core_id in self._all_ids() if any(is_named(core_id, name) for name in request_ids)]
        self._abort_and_tell(found)
        return len(found)

    def _all_ids(self) -> list[str]:
        return [*self._scheduler.unfinished_ids(), *self._pause.held]

    def _abort_and_tell(self, request_ids: list[str]) -> None:
        held = self._pause.forget(request_ids)
        self._outputs += [EngineCoreOutput(request_id, finish_reason=FinishReason.ABORT) for request_id in held]
        self._outputs += self._scheduler.abort(request_ids)
        self._lost_some |= bool(request_ids)

    def has_work(self) -> bool:
        """Whether `step` would have anything to do."""
        waits = bool(self._outputs or self._in_flight or self._lost_some or self._has_weight_news)
        return (
            waits
            or (self.turns.is_awake and self._takes_part)
            or self._pause.state is PauseState.DRAINING
            or (self._schedules and self._scheduler.has_unfinished())
        )

    @property
    def _schedules(self) -> bool:
        return not self._asleep and self._pause.state is not PauseState.PAUSED and self._weights_are_whole

    @property
    def _takes_part(self) -> bool:
        """Whether it has what other copies' steps need of it."""
        return not self._asleep and self._weights_are_whole

    def step(self) -> EngineCoreOutputs:
        """Start the steps that can start, take in the oldest finished step; returns its outputs.
        Raises EngineError: the executor failed. The core is of no use after that."""
        if self._outputs or self._has_weight_news:  # older than what another step would tell
            return self.take_outputs()
        if self._schedules:
            self._start_steps()
        if not self._in_flight:
            if self.turns.is_awake and self._takes_part:
                self.heartbeat.step(None)
                self.turns.take(has_work=self._schedules and self._scheduler.has_unfinished())
            self._end_draining()
            has_news = self._lost_some or self._preparations.adapters.has_news
            return self._with_outputs(EngineCoreOutputs(stats=self._gauges() if has_news else None))
        self._scheduler.catch_up()  # The device works: the host has time.
        self.heartbeat.collect()
        return self._with_outputs(self._take_in())

    def _end_draining(self) -> None:
        """Pause, where a draining core has ended all its requests; the requests that were held are queued."""
        pause = self._pause
        if pause.state is PauseState.DRAINING and not self._in_flight and not self._scheduler.has_unfinished():
            self._begin_pause(pause.clears_cache)

    def _begin_pause(self, clear_cache: bool) -> None:
        self._pause.state = PauseState.PAUSED
        if clear_cache:
            self._scheduler.reset_prefix_cache(drop_running=True)
        self._enter_held()

    def _enter_held(self) -> None:
        held, self._pause.held = self._pause.held, {}
        for request in held.values():
            try:
                self._enter(request)
            except QuireError as error:
                self._refuse(request.request_id, error)

    def idle(self) -> bool:
        """Use a moment without work to prepare for later; true where another one could be used. See `Executor.idle`."""
        if self._asleep or self.has_work():
            return False
        return any([*(hook.idle() for hook in self._hooks), self._executor.idle()])  # all of them are asked

    def _start_steps(self) -> None:
        scheduler, in_flight = self._scheduler, self._in_flight
        while len(in_flight) < self._depth and scheduler.has_unfinished():
            for hook in self._hooks:
                hook.before_schedule()
            step = scheduler.schedule()
            self._outputs += scheduler.take_ended()
            if step.total_num_tokens == 0:
                self._check_progress()
                return
            self._preparations.transfers.launch(step)
            self._num_empty_plans = 0
            self.heartbeat.step(scheduler.flights[-1].predicted_ms if scheduler.cost_model.is_ready else None)
            for hook in self._hooks:
                hook.planned(step)
            self._executor.execute(step)
            in_flight.append(step)

    def _check_progress(self) -> None:
        """Raises EngineError after too many plans without a token. A few are normal (everything was preempted), any number while
        a request waits for its grammar."""
        if self._in_flight:
            self._num_empty_plans = 0
            return
        if len(self._preparations):
            self.heartbeat.wait_for_grammar()
        if self._preparations.wait(_PREPARATION_WAIT_S):
            self._num_empty_plans = 0
            return
        self._num_empty_plans += 1
        if self._num_empty_plans > _MAX_EMPTY_PLANS:
            stats = self._scheduler.stats()
            raise EngineError(
                f"the scheduler plans nothing, with {stats.num_running} requests running, {stats.num_waiting} waiting and "
                f"{stats.num_free_blocks} of {stats.num_total_blocks} pages free"
            )

    def _take_in(self) -> EngineCoreOutputs:
        result = self._executor.collect()
        self._lost_some = False
        step = self._in_flight.popleft()
        self._preparations.transfers.take_in(result)
        outputs = self._scheduler.update(step, result)
        self._tell_adapters(outputs.stats)
        for hook in self._hooks:
            hook.after_step(step, result)
        return outputs

    def _gauges(self) -> SchedulerStats:
        """The figures of now without a step, which would have told them: who was aborted neither runs nor waits."""
        self._lost_some = False
        gauges = self._scheduler.stats(since_start=False)
        self._tell_adapters(gauges)
        return gauges

    def take_outputs(self) -> EngineCoreOutputs:
        """What is to be told without another step."""
        return self._with_outputs(EngineCoreOutputs(weights=self._take_weight_news()))

    def _with_outputs(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        if self._outputs:
            outputs.outputs = [*self._outputs, *outputs.outputs]
            self._outputs = []
        outputs.queue = self._scheduler.bounds.news()
        return outputs

    # --- utilities ---

    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a control verb by its name. Raises EngineError: there is none of this name."""
        if name not in UTILITIES:
            raise EngineError(f"the engine core has no utility {name!r}")
        if (
            self.config.parallel.sharing is not None and self._takes_part
        ):  # a call may wait for all copies, as a step does
            self._drain()
            self.turns.meet()
        return getattr(self, name)(*args, **kwargs)

    @utility
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; with `reset_running_requests` these compute theirs again, with `reset_connector` what a
        connector has saved is forgotten, too."""
        if reset_connector:
            self._preparations.transfers.reset()
        if reset_running_requests:
            self._drain()
        self._scheduler.reset_prefix_cache(drop_running=reset_running_requests)
        return True

    @utility
    def reset_encoder_cache(self) -> None:
        """Forget encoders' outputs, but for those that running requests wait for."""
        self._scheduler.encoding.reset()

    @utility
    def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Schedule nothing until `resume`; new requests wait. Unfinished requests are aborted, or end first (`wait`: see
        `pause_state`), or are kept and go on later (`keep`). `clear_cache` forgets cached prefixes then, and what was kept is
        computed anew."""
        check_mode(mode)
        pause = self._pause
        if mode == "wait" and pause.state is not PauseState.PAUSED:
            pause.state, pause.clears_cache = PauseState.DRAINING, clear_cache
            self._end_draining()
            return
        self._drain()
        if mode == "abort":
            self._abort_and_tell(self._all_ids())
        self._begin_pause(clear_cache)

    @utility
    def resume(self) -> None:
        self._pause.state = PauseState.RUNNING
        self._enter_held()

    @utility
    def pause_state(self) -> str:
        """`running`, `draining` or `paused`."""
        return self._pause.state.value

    @utility
    def is_standing_still(self) -> bool:
        """Whether the core sleeps, or requests are unfinished that no step goes on with."""
        return bool(self._asleep) or (not self._schedules and self._scheduler.has_unfinished())

    @utility
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: level 0 none (a pause), level 1 the pages and a device's weights (which wait in host
        memory), level 2 drops the weights. Unfinished requests are aborted, or kept and computed anew (`keep`); `wait` is
        refused while there are any, except at level 0."""
        if level not in (0, 1, 2):
            allowed = "0 (pause), 1 (drop pages) or 2 (drop weights too)"
            raise RequestError(f"level is {level}; it may be {allowed}", param="level")
        check_mode(mode)
        if level == 0:
            self.pause(mode, clear_cache=False)
            return
        if mode == "wait" and self._scheduler.has_unfinished():
            raise RequestError("mode is 'wait', and requests are unfinished still", param="mode")
        if self._is_updating and level == 2:
            raise RequestError("a weight update has begun: finish it first (finish_weight_update)", param="level")
        self._drain()
        if mode == "abort":
            self._abort_and_tell(self._all_ids())
        self._fall_asleep(level)

    def _fall_asleep(self, level: int) -> None:
        self._forget_computed()
        self._executor.sleep(level)
        self._has_dropped_weights |= level == 2
        self._asleep = set(_SLEEPING_PARTS)
        self._sleep_level = level

    @utility
    def release_kv_cache_memory(self) -> None:
        """Give the pages alone back, until `wake_up(["kv_cache"])`; unfinished requests are kept, and computed anew."""
        self._drain()
        self._fall_asleep(0)
        self._asleep = {"kv_cache"}

    @property
    def _weights_sleep(self) -> bool:
        return "weights" in self._asleep

    def _forget_computed(self) -> None:
        self._preparations.transfers.reset()
        self._scheduler.reset_prefix_cache(drop_running=True)
        self._preparations.adapters.forget()

    def _refuse_all(self, error: QuireError) -> None:
        ids = self._all_ids()
        self.abort_requests(ids)
        for request_id in ids:
            self._refuse(request_id, error)

    def _drain(self) -> None:
        """Take in what is in flight; nothing of it is lost."""
        while self._in_flight:
            outputs = self._take_in()
            self._outputs += [
                EngineCoreOutput(core_id, [token_id])
                for core_id, token_id in zip(outputs.plain_ids, outputs.plain_tokens, strict=True)
            ]
            self._outputs += outputs.outputs

    @utility
    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, all of it or only `weights`, `kv_cache` or `scheduling` (a pause); whether nothing sleeps any more."""
        asked = set(tags if tags is not None else _WAKING_PARTS)
        if unknown := asked - set(_WAKING_PARTS):
            raise RequestError(f"tags has {sorted(unknown)}; it may have {', '.join(_WAKING_PARTS)}", param="tags")
        if parts := sorted(asked & self._asleep):
            self._executor.wake_up(parts)
            self._asleep -= asked
            if "weights" in parts and self._has_dropped_weights:
                self._has_dropped_weights = False
                self._weights_were_dropped()
        if "scheduling" in asked:
            self.resume()
        return not self.is_sleeping()

    def standing(self) -> Standing:
        """What another core has to know to take this one's place."""
        is_paused = self._pause.state is PauseState.PAUSED
        pinned = sorted(self._preparations.adapters.pinned)
        return Standing(is_paused, self._sleep_level, sorted(self._asleep), pinned_adapters=pinned)

    def restore(self, standing: Standing) -> None:
        """Stand as another core did; this one has no request yet."""
        self._preparations.adapters.pinned.update(standing.pinned_adapters)
        if standing.is_paused:
            self._pause.state = PauseState.PAUSED
        if standing.asleep:
            self._fall_asleep(standing.sleep_level)
            self.wake_up(sorted(set(_SLEEPING_PARTS) - set(standing.asleep)))

    @property
    def is_draining(self) -> bool:
        """Whether it will pause when what runs has ended."""
        return self._pause.state is PauseState.DRAINING

    @utility
    def is_sleeping(self) -> bool:
        """Whether anything sleeps still, or nothing is scheduled."""
        return bool(self._asleep) or self._pause.state is PauseState.PAUSED

    @utility
    def stats(self) -> SchedulerStats:
        """Figures of now; counters since the start."""
        return self._scheduler.stats()

    @utility
    def inspect(self) -> dict[str, Any]:
        """The scheduler's state, its last steps, live and finished requests; see `core/inspection.py`."""
        state = self._scheduler.inspection.state()
        return state if self.config.lora is None else state | {"adapters": self._preparations.adapters.describe()}

    @utility
    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """What happened to a request; None where it is not remembered."""
        return self._scheduler.inspection.timeline(request_id)

    @utility
    def explain(self) -> dict[str, Any]:
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

    @utility
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker, or a function whose first argument is the worker.
        Raises RequestError: there is no such method, or workers in other processes cannot be sent a function.
        Raises TimeoutError: workers in other processes gave no answer within `timeout` seconds."""
        if method in BY_RPC:
            value = self.call_utility(str(method), *args, **(kwargs or {}))
            return [value] * self.config.parallel.world_size
        return self._executor.collective_rpc(method, tuple(args), kwargs, timeout)

    def shutdown(self) -> None:
        """Release everything; may be called twice."""
        self._in_flight.clear()
        while self._hooks:
            self._hooks.pop(0).shutdown()
        self._executor.shutdown()
