"""Everything that is counted about one engine: fed by its steps and its finished requests, read by Prometheus and the log.

Knows `SchedulerStats` and what a finished request tells. Knows nothing of HTTP.
"""

import bisect
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quire.logger import init_logger
from quire.metrics.events import EventKind, EventLog
from quire.metrics.history import History, LastHour
from quire.metrics.tenants import TenantTable
from quire.request import AdapterStats, SchedulerStats

logger = init_logger(__name__)


class Histogram:
    """Counts of observations at or below each bound.

    prometheus-client's own takes a lock for each observation and cannot take several equal ones at once: 85 µs for a step of 64
    rows, against 0.3 µs (measured on an x86 server's core). It renders what is counted here.

    Args:
        bounds: upper bounds in ascending order; one above the last (infinity) is always there.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError("bounds must ascend")
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of bound (as Prometheus writes it) and observations at or below it."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(running)))
        return rows


def steps_1_2_5(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 … up to `limit`."""
    bounds: list[float] = []
    decade = 1
    while True:
        for factor in (1, 2, 5):
            if decade * factor > limit:
                return bounds
            bounds.append(float(decade * factor))
        decade *= 10


def _bounds(numbers: str) -> tuple[float, ...]:
    return tuple(map(float, numbers.split()))


BOUNDS: dict[str, Sequence[float]] = {
    "time_to_first_token": _bounds(
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
    ),
    "inter_token_latency": _bounds(
        "0.0005 0.001 0.002 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0"
    ),
    "request_latency": _bounds(
        "0.001 0.005 0.02 0.05 0.1 0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0"
    ),
    "iteration_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (0, 1, 2, 5, 10, 20),
}
"""Of histograms, by the family of vLLM's that they belong to; `request_tokens` follows the model's length."""
STEP_BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
FINISH_REASONS: tuple[str, ...] = ("stop", "length", "abort", "error", "repetition")


@dataclasses.dataclass(slots=True)
class FinishedRequest:
    """What is known about one sequence when it ends; times in seconds, None where the moment never came.

    Attributes:
        time_to_first_token: from arrival.
        decode_time: from the first token to the last.
        end_to_end: from arrival to the end.
        max_tokens: what the request allowed.
        num_cached_tokens: prompt tokens that the prefix cache gave.
        scheduled: from arrival to leaving the queue.
        most_tokens: of the request's longest sequence, told with the last of its sequences.
        tenant: whose request it is; empty without one.
        num_preemptions: how often it gave up its pages.
    """

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    time_to_first_token: float | None = None
    decode_time: float | None = None
    end_to_end: float | None = None
    max_tokens: int | None = None
    n: int = 1
    num_cached_tokens: int = 0
    scheduled: float | None = None
    most_tokens: int | None = None
    num_preemptions: int = 0
    tenant: str = ""


class Looked(Protocol):
    """A cache that counts."""

    num_queries: int
    num_hits: int


class EngineMetrics:
    """Counters, gauges and histograms of one engine.

    Args:
        model_name: the label that every metric carries.
        max_model_len: the largest prompt or answer, for the bounds of the length histograms.
        bounds: others in the place of `BOUNDS`.

    Attributes:
        events: what happened besides answers.
        tenants: each tenant's requests and tokens.
        batch_lines: lines of batches that were answered, by how.
        adapters: what became of adapters, and the names of those that are in use; None until that is told.
        max_loras: adapters that can be on the device at once.
        media: what was looked for among processed media, and found; None where there are none.
        copies: the figures of each of the model's copies, in order, which are told what it does first; none where there is one.
        first_copy: the number of the first of them.
    """

    def __init__(
        self, model_name: str, max_model_len: int, bounds: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        self.model_name, self._max_model_len, self._bounds = model_name, max_model_len, bounds
        self.copies: list[EngineMetrics] = []
        self.first_copy = 0
        all_bounds = {**BOUNDS, "request_tokens": steps_1_2_5(max_model_len), **(bounds or {})}
        seconds, tokens = all_bounds["request_latency"], all_bounds["inter_token_latency"]
        first, lengths = all_bounds["time_to_first_token"], all_bounds["request_tokens"]
        self.num_running = 0
        self.num_waiting = 0
        self.num_deferred = 0
        self.kv_cache_usage = 0.0
        self.num_preemptions = 0
        self.jumped_tokens = 0
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_position: list[int] = []
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prompt_tokens_cached = 0
        self.num_steps = 0
        self.media: Looked | None = None
        self.events = EventLog()
        self.tenants = TenantTable()
        self.batch_lines = {"completed": 0, "failed": 0}
        self.adapters: AdapterStats | None = None
        self.max_loras = 0
        self.num_adapter_failures = self.num_adapter_evictions = 0
        self.adapter_load_time = Histogram(first)
        self.success: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        self.iteration_tokens = Histogram(all_bounds["iteration_tokens"])
        self.step_time = Histogram(STEP_BOUNDS)
        self.time_to_first_token = Histogram(first)
        self.inter_token_latency = Histogram(tokens)
        self.time_per_output_token = Histogram(tokens)
        self.end_to_end = Histogram(seconds)
        self.queue_time = Histogram(seconds)
        self.prefill_time = Histogram(seconds)
        self.inference_time = Histogram(seconds)
        self.decode_time = Histogram(seconds)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.request_computed_tokens = Histogram(lengths)
        self.request_most_tokens = Histogram(lengths)
        self.request_max_tokens = Histogram(lengths)
        self.request_n = Histogram(all_bounds["request_params_n"])
        self.request_preemptions = Histogram(all_bounds["request_num_preemptions"])
        self.history = History()
        self.last_hour = LastHour(self.counters)

    def divide(self, num_copies: int) -> Sequence["EngineMetrics"]:
        """Have figures for each of the model's copies as well; returns them."""
        self.copies = [EngineMetrics(self.model_name, self._max_model_len, self._bounds) for _ in range(num_copies)]
        return self.copies

    def record_step(self, stats: SchedulerStats) -> None:
        """One step's figures; counters in them are of that step alone."""
        if self.copies:
            self.num_running, self.num_waiting, self.num_deferred = (
                sum(getattr(copy, name) for copy in self.copies)
                for name in ("num_running", "num_waiting", "num_deferred")
            )
            self.kv_cache_usage = sum(copy.kv_cache_usage for copy in self.copies) / len(self.copies)
        else:
            self.num_running = stats.num_running
            self.num_waiting, self.num_deferred = stats.num_waiting, stats.num_deferred
            if stats.num_total_blocks:
                self.kv_cache_usage = 1.0 - stats.num_free_blocks / stats.num_total_blocks
        self.num_preemptions += stats.num_preemptions
        self.jumped_tokens += stats.num_jumped_tokens
        if stats.num_drafts:
            self._record_drafts(stats)
        self.prefix_cache_queries += stats.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits
        if stats.adapters is not None:
            self.adapters = stats.adapters
            self.num_adapter_failures += stats.adapters.num_failures
            self.num_adapter_evictions += stats.adapters.num_evictions
            for seconds in stats.adapters.load_seconds:
                self.adapter_load_time.observe(seconds)
        if stats.num_batched_tokens:
            self.num_steps += 1
            self.iteration_tokens.observe(stats.num_iteration_tokens)
            if stats.step_ms > 0.0:
                self.step_time.observe(stats.step_ms / 1e3)
        self.history.note(self.num_running, self.num_waiting, self.kv_cache_usage, self.generation_tokens)
        self.last_hour.note()

    def counters(self) -> dict[str, float]:
        """What tells whether an engine does well, under Prometheus' names."""
        happened = self.events.totals
        return {
            "request_success_total": float(sum(self.success.values())),
            "request_queue_time_seconds_sum": self.queue_time.total,
            "request_queue_time_seconds_count": float(self.queue_time.count),
            "num_preemptions_total": float(self.num_preemptions),
            "prefix_cache_queries_total": float(self.prefix_cache_queries),
            "prefix_cache_hits_total": float(self.prefix_cache_hits),
            "admission_rejections_total": float(happened[EventKind.REFUSAL]),
            "request_deadlines_missed_total": float(happened[EventKind.DEADLINE]),
            "engine_restarts_total": float(happened[EventKind.RESTART]),
            "requests_given_up_total": float(happened[EventKind.GIVEN_UP]),
        }

    def _record_drafts(self, stats: SchedulerStats) -> None:
        self.num_drafts += stats.num_drafts
        self.num_draft_tokens += stats.num_draft_tokens
        self.num_accepted_tokens += sum(stats.accepted_per_position)
        counts = self.accepted_per_position
        counts += [0] * (len(stats.accepted_per_position) - len(counts))
        for position, count in enumerate(stats.accepted_per_position):
            counts[position] += count

    def record_first_token(self, seconds_since_arrival: float, num_prompt_tokens: int) -> None:
        self.time_to_first_token.observe(seconds_since_arrival)
        self.prompt_tokens += num_prompt_tokens
        self.generation_tokens += 1

    def record_next_tokens(self, seconds: float, count: int = 1, times: int = 1) -> None:
        self.inter_token_latency.observe(seconds / count, count * times)
        self.generation_tokens += count * times

    def record_refusal(self, text: str, tenant: str = "") -> None:
        """There was no room for a request; `text` says why."""
        self.events.add(EventKind.REFUSAL, text)
        self.last_hour.note()
        self.tenants.row_of(tenant).refused += 1

    def record_finished(self, request: FinishedRequest) -> None:
        self.success[request.finish_reason] = self.success.get(request.finish_reason, 0) + 1
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        self.request_generation_tokens.observe(request.num_generation_tokens)
        self.request_n.observe(request.n)
        self.request_preemptions.observe(request.num_preemptions)
        if request.max_tokens is not None:
            self.request_max_tokens.observe(request.max_tokens)
        if request.end_to_end is not None:
            self.end_to_end.observe(request.end_to_end)
        if request.most_tokens is not None:
            self.request_most_tokens.observe(request.most_tokens)
        if request.scheduled is not None:
            self._record_tenant(request)
            self.queue_time.observe(request.scheduled)
            self.request_computed_tokens.observe(request.num_prompt_tokens - request.num_cached_tokens)
            self.prompt_tokens_cached += request.num_cached_tokens
            if request.time_to_first_token is not None:
                self.prefill_time.observe(max(0.0, request.time_to_first_token - request.scheduled))
            if request.end_to_end is not None:
                self.inference_time.observe(max(0.0, request.end_to_end - request.scheduled))
        if request.decode_time is not None:
            self.decode_time.observe(request.decode_time)
            if request.num_generation_tokens > 1:
                self.time_per_output_token.observe(request.decode_time / (request.num_generation_tokens - 1))

    def _record_tenant(self, request: FinishedRequest) -> None:
        row = self.tenants.row_of(request.tenant)
        row.generation_tokens += request.num_generation_tokens
        if request.most_tokens is not None:  # the last of its sequences, which share a prompt
            row.requests += 1
            row.prompt_tokens += request.num_prompt_tokens


class StatsLogger:
    """Writes throughput since its last line, and the present state, at most once in `interval_s` seconds."""

    def __init__(self, metrics: EngineMetrics, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._clock = clock
        self._last_time = clock()
        self._last_prompt = 0
        self._last_generation = 0
        self._last_queries = 0
        self._last_hits = 0

    def tick(self) -> str | None:
        """After a step: the line that was logged, if it was time for one."""
        now = self._clock()
        elapsed = now - self._last_time
        if elapsed < self._interval_s:
            return None
        if elapsed > 2 * self._interval_s:  # it was idle: rates since then would say nothing
            self._remember(now)
            return None
        metrics = self._metrics
        prompt_rate = (metrics.prompt_tokens - self._last_prompt) / elapsed
        generation_rate = (metrics.generation_tokens - self._last_generation) / elapsed
        queries = metrics.prefix_cache_queries - self._last_queries
        hits = metrics.prefix_cache_hits - self._last_hits
        line = (
            f"Throughput: prompt {prompt_rate:.1f}, generation {generation_rate:.1f} tokens/s; "
            f"running {metrics.num_running}, waiting {metrics.num_waiting}; "
            f"KV cache {metrics.kv_cache_usage:.1%}"
        )
        if queries:
            line += f"; prefix hits {hits / queries:.1%}"
        self._remember(now)
        logger.info("%s", line)
        return line

    def _remember(self, now: float) -> None:
        metrics = self._metrics
        self._last_time = now
        self._last_prompt, self._last_generation = metrics.prompt_tokens, metrics.generation_tokens
        self._last_queries, self._last_hits = metrics.prefix_cache_queries, metrics.prefix_cache_hits
