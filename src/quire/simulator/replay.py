"""Replays traffic: on a virtual clock with predicted steps, or on a real engine core with real ones. One loop for both.

The virtual engine is the engine's scheduler, unmodified, beside a device that takes as long as the costs say. Copies get requests
as those of `--data-parallel-size` do (`engine/replica_choice.py`). Knows nothing of models, devices or files.
"""

import collections
import dataclasses
import itertools
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.core.scheduler import Scheduler
from quire.engine.core import EngineCore
from quire.engine.replica_choice import PIECE_TOKENS, Assignment, ReplicaChooser, keys_of
from quire.errors import CapacityError, EngineError
from quire.request import EngineCoreOutputs, EngineRequest
from quire.simulator.step_costs import StepCosts, of_size
from quire.simulator.traffic import Arrival, numbered

MADE_UP_TOKEN = 7
_HASH_KEY = b"a simulation has no secrets"

TIMES = {"ttft": "first_token", "tpot": "per_token", "e2el": "end_to_end"}
"""To the first token, a token after it, to the end: what results call them, and the fields of `Figures`."""


class Engine(Protocol):
    """What a replay drives. Attributes: now: seconds from the start."""

    @property
    def now(self) -> float: ...

    def add(self, request: EngineRequest) -> None:
        """A request comes, at its arrival time or later."""

    def step(self) -> EngineCoreOutputs | None:
        """One turn of the engine's loop; None where there is nothing to do."""

    def wait_until(self, seconds: float) -> None:
        """Nothing is to be done before."""


class VirtualEngine:
    """A scheduler, and a device that takes predicted times.

    Args:
        config: the engine's; its scheduler's settings, and `async_scheduling` for steps that are planned ahead.
        pages: the KV cache.
        costs: of steps.
    """

    def __init__(self, config: EngineConfig, pages: KVCacheConfig, costs: StepCosts) -> None:
        self.now = 0.0
        self._costs, self._depth = costs, config.scheduler.depth
        self._scatter = [itertools.cycle(factors) for factors in costs.scatter]
        self._free_at = 0.0
        self._flights: collections.deque[tuple[SchedulerOutput, float, float]] = collections.deque()
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            pages,
            max_model_len=config.model.max_model_len,
            hash_key=_HASH_KEY,
            clock=lambda: self.now,
        )

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add_request(request)

    def wait_until(self, seconds: float) -> None:
        self.now = max(self.now, seconds)

    def step(self) -> EngineCoreOutputs | None:
        """Plan what may be planned, and let time pass until the oldest step has ended."""
        scheduler = self.scheduler
        while len(self._flights) < self._depth and scheduler.has_unfinished():
            step = scheduler.schedule()
            if step.total_num_tokens == 0:
                break
            flight = scheduler.flights[-1]
            tokens = step.total_num_tokens
            step_ms = self._costs.step_ms(tokens, len(step.rows), flight.attended) * next(
                of_size(self._scatter, tokens)
            )
            self._free_at = max(self.now, self._free_at) + step_ms / 1e3
            self._flights.append((step, self._free_at, step_ms * of_size(self._costs.told, tokens)))
        if not self._flights:
            if scheduler.has_unfinished():
                raise EngineError("the simulated scheduler plans nothing, and requests are unfinished")
            return None
        step, ended, told_ms = self._flights.popleft()
        self.now = ended
        scheduler.catch_up()
        rows = step.rows[step.needs_sample]
        tokens = np.full(len(rows), MADE_UP_TOKEN, np.int32)
        return scheduler.update(step, ModelRunnerOutput(step.step_id, rows, tokens, step_ms=told_ms))


class WallClock:
    """Seconds since it was made, as people count them."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def wait_until(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds - self.now))


class RealEngine:
    """An engine core of this process, on a clock of its own; by default a `WallClock`."""

    def __init__(self, core: EngineCore, clock: WallClock | None = None) -> None:
        self.core = core
        self._clock = clock or WallClock()

    @property
    def now(self) -> float:
        return self._clock.now

    def add(self, request: EngineRequest) -> None:
        request.arrival_time = time.monotonic() - max(0.0, self.now - request.arrival_time)
        self.core.add_requests([request])

    def wait_until(self, seconds: float) -> None:
        self._clock.wait_until(seconds)

    def step(self) -> EngineCoreOutputs | None:
        return self.core.step() if self.core.has_work() else None


@dataclasses.dataclass
class Figures:
    """What became of the requests; seconds.

    Attributes:
        first_token: from arrival to the first token, of requests that were answered.
        per_token: mean time a token after the first, of answers with at least two.
        end_to_end: from arrival to the end.
        num_requests, num_refused: that came, and for which the queue had no room.
        duration: until the last one ended.
        num_prompt_tokens, num_output_tokens: of those that were answered.
        num_steps, num_cached_tokens: of all engines; prompt tokens that a prefix cache gave.
    """

    first_token: "array[float]" = dataclasses.field(default_factory=lambda: array("d"))
    per_token: "array[float]" = dataclasses.field(default_factory=lambda: array("d"))
    end_to_end: "array[float]" = dataclasses.field(default_factory=lambda: array("d"))
    num_requests: int = 0
    num_refused: int = 0
    duration: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_cached_tokens: int = 0

    def percentile(self, name: str, share: float) -> float:
        """Of `first_token`, `per_token` or `end_to_end`; 0 where there are none. `share`: 0 to 100."""
        values = getattr(self, name)
        return float(np.percentile(np.frombuffer(values, np.float64), share)) if len(values) else 0.0

    def summary(self) -> dict[str, Any]:
        """As a result's file has it."""
        times = {
            f"{short}_p{share}_ms": 1e3 * self.percentile(name, share)
            for short, name in TIMES.items()
            for share in (50, 90, 99)
        }
        counts = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in TIMES.values()
        }
        seconds = self.duration or 1.0
        return {
            **counts,
            **times,
            "requests_per_second": len(self.end_to_end) / seconds,
            "output_tokens_per_second": self.num_output_tokens / seconds,
        }


@dataclasses.dataclass(slots=True)
class _Open:
    """A request under way. Attributes: first: when its first token came; 0 before."""

    arrival: Arrival
    assignment: Assignment
    first: float = 0.0


class Replay:
    """Gives traffic to engines, and notes what becomes of it."""

    def __init__(self, engines: Sequence[Engine], *, by_prefix: bool = True) -> None:
        self._engines = engines
        self._chooser = ReplicaChooser(len(engines), by_prefix=by_prefix and len(engines) > 1)
        self._open: dict[str, _Open] = {}
        self._unanswered: set[str] = set()
        self.figures = Figures()

    def run(self, arrivals: Iterable[Arrival]) -> Figures:
        """All of it, to the last token."""
        for number, arrival in numbered(arrivals):
            for engine in self._engines:
                self._advance(engine, arrival.seconds)
            self._add(arrival.request(number), arrival)
        for engine in self._engines:
            while (outputs := engine.step()) is not None:
                self._take_in(engine, outputs)
        figures = self.figures
        figures.duration = max(engine.now for engine in self._engines)
        if self._open:
            raise EngineError(f"{len(self._open)} requests have not ended, among them {min(self._open)}")
        return figures

    def _advance(self, engine: Engine, seconds: float) -> None:
        """Let an engine work until this moment."""
        while engine.now < seconds:
            outputs = engine.step()
            if outputs is None:
                engine.wait_until(seconds)
            else:
                self._take_in(engine, outputs)

    def _add(self, request: EngineRequest, arrival: Arrival) -> None:
        self.figures.num_requests += 1
        keys: list[int] = []
        if len(self._engines) > 1:
            keys = keys_of(request.prompt_token_ids)
        assignment = self._chooser.choose(keys, PIECE_TOKENS, arrival.prompt_tokens, range(len(self._engines)))
        self._open[request.request_id] = _Open(arrival, assignment)
        self._unanswered.add(request.request_id)
        try:
            self._engines[assignment.replica].add(request)
        except CapacityError:
            self._end(request.request_id)
            self.figures.num_refused += 1

    def _end(self, request_id: str) -> _Open:
        self._unanswered.discard(request_id)
        one = self._open.pop(request_id)
        self._chooser.end(one.assignment)
        return one

    def _answered(self, request_id: str, now: float) -> None:
        if request_id in self._unanswered:
            self._unanswered.discard(request_id)
            one = self._open[request_id]
            one.first = now
            self._chooser.begin_answer(one.assignment)

    def _take_in(self, engine: Engine, outputs: EngineCoreOutputs) -> None:
        now, figures = engine.now, self.figures
        figures.num_steps += 1
        if self._unanswered:
            for request_id in outputs.plain_ids:
                self._answered(request_id, now)
        for output in outputs.outputs:
            if output.new_token_ids:
                self._answered(output.request_id, now)
            figures.num_cached_tokens += max(0, output.num_cached_tokens)
            if output.finish_reason is None:
                continue
            one = self._end(output.request_id)
            if output.error is not None:
                if output.refusal is None or not output.refusal.is_capacity:
                    raise EngineError(f"request {output.request_id} failed: {output.error}")
                figures.num_refused += 1
                continue
            self._note(one, now)

    def _note(self, one: _Open, now: float) -> None:
        figures, arrival = self.figures, one.arrival
        figures.first_token.append(one.first - arrival.seconds)
        figures.end_to_end.append(now - arrival.seconds)
        if arrival.output_tokens > 1:
            figures.per_token.append((now - one.first) / (arrival.output_tokens - 1))
        figures.num_prompt_tokens += arrival.prompt_tokens
        figures.num_output_tokens += arrival.output_tokens
