"""How many devices a load needs: pages and costs of a model on a device, limits that latencies must keep, the search.

Knows configurations and replays. Prints nothing.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, describe_memory
from quire.core.cost_model import CostModel
from quire.core.kv_planner import plan_kv_cache
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.core.scheduler import Scheduler
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.platforms import current_platform
from quire.processes import settle_collector
from quire.request import EngineCoreOutputs
from quire.simulator.replay import TIMES, Figures, RealEngine, Replay, VirtualEngine, WallClock
from quire.simulator.step_costs import STEADY, Device, EstimatedCosts, FittedCosts, StepCosts
from quire.simulator.traffic import Arrival, poisson

MIN_OF_A_SIZE = 3
"""Turns of about as many tokens that say how far they are from the line."""


@dataclasses.dataclass(frozen=True)
class Slo:
    """Limits that a share of all requests keeps. Attributes: seconds: by name; `percentile`: 0 to 100."""

    seconds: Mapping[str, float]
    percentile: float = 99.0

    def is_met(self, figures: Figures) -> bool:
        """Whether no request was refused, and each limit holds."""
        return not figures.num_refused and all(
            figures.percentile(TIMES[name], self.percentile) <= limit for name, limit in self.seconds.items()
        )


def parse_slo(text: str, percentile: float = 99.0) -> Slo:
    """`ttft=500ms,tpot=0.05`: seconds, or with their unit. Raises ConfigError."""
    seconds: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in TIMES:
            raise ConfigError.of(
                "slo", f"{name!r} has no limit; limits are {', '.join(TIMES)}, as in ttft=500ms,tpot=50ms"
            )
        number, unit = (value[:-2], 1e-3) if value.endswith("ms") else (value.removesuffix("s"), 1.0)
        try:
            seconds[name] = float(number) * unit
        except ValueError:
            raise ConfigError.of("slo", f"{part!r} is no time; write {name}=500ms or {name}=0.5") from None
        if not seconds[name] > 0:
            raise ConfigError.of("slo", f"{part!r} must be above 0")
    return Slo(seconds, percentile)


@dataclasses.dataclass(frozen=True)
class Site:
    """A model on a device, as the simulator needs it."""

    config: EngineConfig
    pages: KVCacheConfig
    costs: StepCosts

    def replay(self, arrivals: Iterable[Arrival], num_copies: int, *, by_prefix: bool = True) -> Figures:
        """Simulate copies of it under this traffic."""
        engines = [VirtualEngine(self.config, self.pages, self.costs) for _ in range(num_copies)]
        return Replay(engines, by_prefix=by_prefix).run(arrivals)


def site_on(config: EngineConfig, device: Device, costs: FittedCosts | None = None) -> Site:
    """A model on a device that need not be here.

    Args:
        config: as resolved on this machine; weights and pages have its types.
        costs: measured ones; by default they are estimated from the data sheet.

    Raises:
        ConfigError: the model and one request of full length do not fit.
    """
    numbers, specs = _describe(config)
    scheduler = dataclasses.replace(config.scheduler, async_scheduling=True, record_timelines=False)
    config = dataclasses.replace(config, scheduler=scheduler)
    weights = int(numbers["weight_bytes"])
    usable = int(device.memory * config.cache.gpu_memory_utilization)
    available = usable - weights - int(numbers.get("workspace_bytes", 0))
    if available <= 0:
        message = (
            f"the weights have {weights / 1e9:.1f} GB, and the device lends {usable / 1e9:.1f} GB: name a larger device"
        )
        raise ConfigError.of("device", message)
    length = config.model.max_model_len
    pages = plan_kv_cache(specs, available, config.cache, scheduler, max_model_len=length)
    return Site(config, pages, costs or _estimate(device, numbers, specs))


def _describe(config: EngineConfig) -> tuple[dict[str, Any], list[KVCacheSpec]]:
    from quire.worker.dry_run import describe_without_weights

    return describe_without_weights(config, current_platform(config.device.device))


def _estimate(device: Device, numbers: Mapping[str, Any], specs: list[KVCacheSpec]) -> EstimatedCosts:
    memory = describe_memory(specs)
    layers = max(1, len(specs))
    return EstimatedCosts(
        device=device,
        weight_bytes=float(numbers["weight_bytes"]),
        parameters=float(numbers.get("active_parameters", numbers["parameters"])),
        kv_bytes=float(memory["kv_bytes_per_token"]),
        pair_flops=4.0 * float(numbers["hidden"]) * layers,
    )


class NotingScheduler(Scheduler):
    """The scheduler, which notes the steps that it has planned and taken in.

    Attributes:
        plans: rows and tokens of each step, in order.
        shapes: tokens, sequences and attended pairs of the steps that were taken in. told_ms: what they took, as it was told.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.plans: list[tuple[list[int], list[int]]] = []
        self.shapes: list[tuple[int, int, float]] = []
        self.told_ms: list[float] = []

    def schedule(self) -> SchedulerOutput:
        step = super().schedule()
        if step.total_num_tokens:
            self.plans.append((step.rows.tolist(), step.num_scheduled_tokens.tolist()))
        return step

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        if step.total_num_tokens:
            self.shapes.append((step.total_num_tokens, len(step.rows), self.flights[0].attended))
            self.told_ms.append(output.step_ms)
        return super().update(step, output)


def noting(config: EngineConfig) -> tuple[EngineConfig, list[NotingScheduler]]:
    """The configuration with a scheduler that notes its steps, and the list where it can be found once there is a core."""
    made: list[NotingScheduler] = []

    class Found(NotingScheduler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, scheduler_cls=Found)), made


class _Timed(RealEngine):
    """Notes how long each turn of the loop took, from the end of the one before: what is done between them belongs to it."""

    def __init__(self, core: EngineCore, scheduler: NotingScheduler, clock: WallClock) -> None:
        super().__init__(core, clock)
        self._scheduler = scheduler
        self.turns: list[Turn] = []
        self._ended: float | None = None

    def step(self) -> EngineCoreOutputs | None:
        began, before = self.now if self._ended is None else self._ended, len(self._scheduler.shapes)
        outputs = super().step()
        if len(self._scheduler.shapes) > before:
            self.turns.append((self._scheduler.shapes[-1], 1e3 * (self.now - began), self._scheduler.told_ms[-1]))
        self._ended = self.now
        return outputs

    def wait_until(self, seconds: float) -> None:
        super().wait_until(seconds)
        self._ended = None


def calibration_loads(max_model_len: int, max_num_seqs: int) -> list[list[Arrival]]:
    """Loads whose steps differ in tokens, sequences and contexts; most of all requests alone, whose steps are the most common
    ones and scatter the most."""
    short, long = max(8, min(128, max_model_len // 16)), max(16, min(2048, max_model_len // 3))
    answer = max(8, min(32, max_model_len // 8))
    loads = [[Arrival(0.0, short, answer)] * count for count in (1, 2, 4, 8, 16, 32, 48) if count <= 2 * max_num_seqs]
    loads += [[Arrival(0.0, long, answer // 2)], [Arrival(0.0, long, answer // 2)] * 4]
    loads.append(list(poisson(200.0, 40, short, answer, seed=1)))
    loads += [[Arrival(0.0, short, answer)]] * 30
    return loads


Turn = tuple[tuple[int, int, float], float, float]
"""A turn of an engine's loop: its tokens, sequences and attended pairs, milliseconds, and those that the scheduler was told."""


def measure_turns(
    core: EngineCore,
    scheduler: NotingScheduler,
    repeats: int = 2,
    clock: Callable[[], WallClock] = WallClock,
) -> list[Turn]:
    """Turns of a real core's loop under various loads, in order."""
    turns: list[Turn] = []
    for repeat in range(repeats + 1):
        for load in calibration_loads(core.config.model.max_model_len, core.config.scheduler.max_num_seqs):
            core.call_utility("reset_prefix_cache")
            engine = _Timed(core, scheduler, clock())
            Replay([engine]).run(load)
            if repeat:  # the first round warms up
                turns += engine.turns
    return turns


def fit_costs(turns: Sequence[Turn]) -> FittedCosts:
    """What a turn costs by its shape: a line through all, how turns of more and more tokens bend away from it, how they scatter,
    and what share of them the scheduler is told. Raises ConfigError: too few turns for a fit."""
    mixed = random.Random(0).sample(turns, len(turns))  # the model forgets slowly: each load shall be among the last
    model = CostModel()
    for (tokens, sequences, attended), turn_ms, _ in mixed:
        model.observe(tokens, sequences, attended, turn_ms)
    if not model.is_ready:
        raise ConfigError.of("device", f"only {len(turns)} steps were measured, too few to fit costs")
    line = FittedCosts(*model.coefficients)
    by_size: dict[int, list[Turn]] = {}
    for turn in turns:
        by_size.setdefault(turn[0][0].bit_length(), []).append(turn)
    bends, scatter, told = [1.0], list[tuple[float, ...]](STEADY), [1.0]
    for size in range(1, max(by_size) + 1):
        some = by_size.get(size, [])
        ratios = [turn_ms / line.step_ms(*shape) for shape, turn_ms, _ in some]
        enough = len(some) >= MIN_OF_A_SIZE
        mean = sum(ratios) / len(ratios) if enough else bends[-1]
        bends.append(mean)
        scatter.append(tuple(round(ratio / mean, 3) for ratio in ratios) if enough else scatter[-1])
        shares = sum(told_ms for _, _, told_ms in some), sum(turn_ms for _, turn_ms, _ in some)
        told.append(shares[0] / shares[1] if enough else told[-1])
    return dataclasses.replace(line, bends=tuple(bends), scatter=tuple(scatter), told=tuple(told))


def site_here(config: EngineConfig, costs: FittedCosts | None) -> Site:
    """A model on this machine: its engine is started, and its steps are measured where `costs` are not given."""
    noted, made = noting(config)
    core = EngineCore(noted)
    settle_collector()  # as a core's own process does
    try:
        fitted = costs or fit_costs(measure_turns(core, made[0]))
        settled = dataclasses.replace(config, model=core.config.model, cache=core.config.cache)
        quiet = dataclasses.replace(config.scheduler, record_timelines=False)
        return Site(dataclasses.replace(settled, scheduler=quiet), core.kv_cache, fitted)
    finally:
        core.shutdown()


@dataclasses.dataclass(frozen=True)
class Trial:
    """One simulation. Attributes: settings: what it was tried with; `meets`: the limits hold."""

    num_devices: int
    settings: Mapping[str, Any]
    figures: Figures
    meets: bool
    seconds: float


def search(
    run: Callable[[int], Figures], slo: Slo, settings: Mapping[str, Any], counts: Sequence[int], most: int
) -> list[Trial]:
    """Trials with these numbers of devices; without any: the smallest number that keeps the limits, found by doubling and then
    by halving the interval, and what was tried on the way. `most` is the largest number that is tried."""
    trials: dict[int, Trial] = {}

    def attempt(count: int) -> bool:
        if count not in trials:
            began = time.perf_counter()
            figures = run(count)
            seconds = time.perf_counter() - began
            trials[count] = Trial(count, settings, figures, slo.is_met(figures), seconds)
        return trials[count].meets

    if counts:
        for count in counts:
            attempt(count)
    else:
        low, high = 0, 1
        while not attempt(high) and high < most:
            low, high = high, min(2 * high, most)
        while trials[high].meets and high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if attempt(middle) else (middle, high)
    return [trials[count] for count in sorted(trials)]
