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
    "step_time": _bounds("0.0005 0.001 0.002 0.003 0.005 0.0075 0.01 0.015 0.02 0.03 0.05 0.1 0.2 0.5 1.0 2.0"),
}
"""Of histograms, by the family of vLLM's that they belong to; `request_tokens` follows the model's length."""
COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that reached their first token.",
    "prompt_tokens_cached": "Prompt tokens of finished sequences that the prefix cache gave.",
    "generation_tokens": "Tokens generated.",
    "jumped_tokens": "Generated tokens that no step sampled, because a grammar left no choice.",
    "num_preemptions": "Times that a running sequence gave up its pages.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Times that a sequence had guessed tokens verified.",
    "spec_decode_num_draft_tokens": "Guessed tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Guessed tokens that were right.",
    "lora_load_failures": "Adapters that could not be loaded.",
    "lora_evictions": "Adapters that gave up their place on the device to another one.",
    "engine_steps": "Steps that computed at least one token.",
}
"""What is counted since the start, by its name."""
HISTOGRAMS = {
    "iteration_tokens_total": ("iteration_tokens", "Prompt tokens computed and tokens generated in a step."),
    "step_time_seconds": ("step_time", "What a step took the device, where that is known."),
    "time_to_first_token_seconds": ("time_to_first_token", "From arrival to the first token."),
    "inter_token_latency_seconds": ("inter_token_latency", "Between two tokens of a sequence."),
    "request_time_per_output_token_seconds": (
        "inter_token_latency",
        "A sequence's mean time a token after its first.",
    ),
    "time_per_output_token_seconds": ("inter_token_latency", "The same, under its older name."),
    "e2e_request_latency_seconds": ("request_latency", "From arrival to the end."),
    "request_queue_time_seconds": ("request_latency", "From arrival to leaving the queue."),
    "request_prefill_time_seconds": ("request_latency", "From leaving the queue to the first token."),
    "request_decode_time_seconds": ("request_latency", "From the first token to the last."),
    "request_inference_time_seconds": ("request_latency", "From leaving the queue to the end."),
    "request_prompt_tokens": ("request_tokens", "Prompt tokens of a finished sequence."),
    "request_prefill_kv_computed_tokens": (
        "request_tokens",
        "Prompt tokens of a finished sequence that the prefix cache did not give.",
    ),
    "request_generation_tokens": ("request_tokens", "Tokens that a finished sequence generated."),
    "request_max_num_generation_tokens": ("request_tokens", "Tokens of the longest sequence of a finished request."),
    "request_params_max_tokens": ("request_tokens", "max_tokens of finished requests."),
    "request_params_n": ("request_params_n", "n of finished requests."),
    "request_num_preemptions": ("request_num_preemptions", "Times that a finished sequence gave up its pages."),
    "lora_load_time_seconds": ("time_to_first_token", "What loading an adapter took, from disk or from the host."),
}
"""Of each histogram, by its name: the family whose bounds it has, and what it counts."""
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

    def observations(self) -> dict[str, float | None]:
        """What it tells to histograms, by their names; None where it tells nothing."""
        num_more = self.num_generation_tokens - 1
        token_time = None if self.decode_time is None or num_more < 1 else self.decode_time / num_more
        return {
            "request_prompt_tokens": self.num_prompt_tokens,
            "request_generation_tokens": self.num_generation_tokens,
            "request_params_n": self.n,
            "request_num_preemptions": self.num_preemptions,
            "request_params_max_tokens": self.max_tokens,
            "e2e_request_latency_seconds": self.end_to_end,
            "request_max_num_generation_tokens": self.most_tokens,
            "request_queue_time_seconds": self.scheduled,
            "request_prefill_kv_computed_tokens": (
                None if self.scheduled is None else self.num_prompt_tokens - self.num_cached_tokens
            ),
            "request_prefill_time_seconds": _between(self.scheduled, self.time_to_first_token),
            "request_inference_time_seconds": _between(self.scheduled, self.end_to_end),
            "request_decode_time_seconds": self.decode_time,
            "request_time_per_output_token_seconds": token_time,
            "time_per_output_token_seconds": token_time,
        }


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


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
        counts, histograms: those of `COUNTERS` and `HISTOGRAMS`, by their names.
    """

    def __init__(
        self, model_name: str, max_model_len: int, bounds: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        self.model_name, self._max_model_len, self._bounds = model_name, max_model_len, bounds
        self.copies: list[EngineMetrics] = []
        self.first_copy = 0
        all_bounds = {**BOUNDS, "request_tokens": steps_1_2_5(max_model_len), **(bounds or {})}
        self.histograms = {name: Histogram(all_bounds[family]) for name, (family, _) in HISTOGRAMS.items()}
        self.num_running = 0
        self.num_waiting = 0
        self.num_deferred = 0
        self.kv_cache_usage = 0.0
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.accepted_per_position: list[int] = []
        self.media: Looked | None = None
        self.events = EventLog()
        self.tenants = TenantTable()
        self.batch_lines = {"completed": 0, "failed": 0}
        self.adapters: AdapterStats | None = None
        self.max_loras = 0
        self.success: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
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
        self.counts["num_preemptions"] += stats.num_preemptions
        self.counts["jumped_tokens"] += stats.num_jumped_tokens
        if stats.num_drafts:
            self._record_drafts(stats)
        self.counts["prefix_cache_queries"] += stats.prefix_cache_queries
        self.counts["prefix_cache_hits"] += stats.prefix_cache_hits
        if stats.adapters is not None:
            self.adapters = stats.adapters
            self.counts["lora_load_failures"] += stats.adapters.num_failures
            self.counts["lora_evictions"] += stats.adapters.num_evictions
            for seconds in stats.adapters.load_seconds:
                self.histograms["lora_load_time_seconds"].observe(seconds)
        if stats.num_batched_tokens:
            self.counts["engine_steps"] += 1
            self.histograms["iteration_tokens_total"].observe(stats.num_iteration_tokens)
            if stats.step_ms > 0.0:
                self.histograms["step_time_seconds"].observe(stats.step_ms / 1e3)
        self.history.note(self.num_running, self.num_waiting, self.kv_cache_usage, self.counts["generation_tokens"])
        self.last_hour.note()

    def counters(self) -> dict[str, float]:
        """What tells whether an engine does well, under Prometheus' names."""
        happened, queued = self.events.totals, self.histograms["request_queue_time_seconds"]
        return {
            "request_success_total": float(sum(self.success.values())),
            "request_queue_time_seconds_sum": queued.total,
            "request_queue_time_seconds_count": float(queued.count),
            "num_preemptions_total": float(self.counts["num_preemptions"]),
            "prefix_cache_queries_total": float(self.counts["prefix_cache_queries"]),
            "prefix_cache_hits_total": float(self.counts["prefix_cache_hits"]),
            "admission_rejections_total": float(happened[EventKind.REFUSAL]),
            "request_deadlines_missed_total": float(happened[EventKind.DEADLINE]),
            "engine_restarts_total": float(happened[EventKind.RESTART]),
            "requests_given_up_total": float(happened[EventKind.GIVEN_UP]),
        }

    def _record_drafts(self, stats: SchedulerStats) -> None:
        self.counts["spec_decode_num_drafts"] += stats.num_drafts
        self.counts["spec_decode_num_draft_tokens"] += stats.num_draft_tokens
        self.counts["spec_decode_num_accepted_tokens"] += sum(stats.accepted_per_position)
        counts = self.accepted_per_position
        counts += [0] * (len(stats.accepted_per_position) - len(counts))
        for position, count in enumerate(stats.accepted_per_position):
            counts[position] += count

    def record_first_token(self, seconds_since_arrival: float, num_prompt_tokens: int) -> None:
        self.histograms["time_to_first_token_seconds"].observe(seconds_since_arrival)
        self.counts["prompt_tokens"] += num_prompt_tokens
        self.counts["generation_tokens"] += 1

    def record_next_tokens(self, seconds: float, count: int = 1, times: int = 1) -> None:
        self.histograms["inter_token_latency_seconds"].observe(seconds / count, count * times)
        self.counts["generation_tokens"] += count * times

    def record_refusal(self, text: str, tenant: str = "") -> None:
        """There was no room for a request; `text` says why."""
        self.events.add(EventKind.REFUSAL, text)
        self.last_hour.note()
        self.tenants.row_of(tenant).refused += 1

    def record_finished(self, request: FinishedRequest) -> None:
        self.success[request.finish_reason] = self.success.get(request.finish_reason, 0) + 1
        for name, value in request.observations().items():
            if value is not None:
                self.histograms[name].observe(value)
        if request.scheduled is not None:
            self._record_tenant(request)
            self.counts["prompt_tokens_cached"] += request.num_cached_tokens

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
        self._last = (clock(), 0, 0, 0, 0)

    def tick(self) -> str | None:
        """After a step: the line that was logged, if it was time for one."""
        now, metrics = self._clock(), self._metrics
        elapsed = now - self._last[0]
        if elapsed < self._interval_s:
            return None
        figures = (
            metrics.counts["prompt_tokens"],
            metrics.counts["generation_tokens"],
            metrics.counts["prefix_cache_queries"],
            metrics.counts["prefix_cache_hits"],
        )
        prompt, generation, queries, hits = (new - old for new, old in zip(figures, self._last[1:], strict=True))
        self._last = (now, *figures)
        if elapsed > 2 * self._interval_s:  # it was idle: rates since then would say nothing
            return None
        line = (
            f"Throughput: prompt {prompt / elapsed:.1f}, generation {generation / elapsed:.1f} tokens/s; "
            f"running {metrics.num_running}, waiting {metrics.num_waiting}; "
            f"KV cache {metrics.kv_cache_usage:.1%}"
        )
        if queries:
            line += f"; prefix hits {hits / queries:.1%}"
        logger.info("%s", line)
        return line
