"""`EngineMetrics` in Prometheus' text format: the meanings of vLLM's metrics, under the prefix `quire:`, vLLM's own, or both.

Figures are kept by `EngineMetrics` and turned into samples only for a scrape. `HttpMetrics` counts HTTP requests.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.config import CacheConfig
from quire.logger import init_logger
from quire.metrics.engine_metrics import COUNTERS, HISTOGRAMS, EngineMetrics, Histogram
from quire.metrics.events import EventKind
from quire.plugins.vendor import METRICS

logger = init_logger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "quire:"
PREFIXES: dict[str, tuple[str, ...]] = {"quire": (PREFIX,), "vllm": ("vllm:",), "both": (PREFIX, "vllm:")}
"""What `--metrics-names` may say, and the prefixes that it means."""

_LABELS = ["model_name", "engine"]
_GAUGES = (
    ("num_requests_running", "num_running", "Sequences that hold a row of the batch."),
    ("num_requests_waiting", "num_waiting", "Sequences in the queue."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of the KV cache's pages in use; 1 is all of them."),
)
_OLDER_GAUGES = (("gpu_cache_usage_perc", "kv_cache_usage", "kv_cache_usage_perc under its older name."),)
"""Names that vLLM has given up and boards still ask for: under its prefix alone."""

_MEDIA = (
    ("mm_cache_queries", "num_queries", "Items of media looked up among those that were processed."),
    ("mm_cache_hits", "num_hits", "Items of media that were not processed again."),
)
_EVENTS = {
    EventKind.RESTART: ("engine_restarts", "Times that the engine core ended by itself and was started again."),
    EventKind.HANG: ("engine_hangs", "Times that the engine core made no progress and was ended."),
    EventKind.REPLAY: ("requests_replayed", "Requests that went on in a new engine core."),
    EventKind.GIVEN_UP: ("requests_given_up", "Requests that failed because engine cores ended under them."),
    EventKind.DEADLINE: ("request_deadlines_missed", "Requests that did not meet their deadline."),
    EventKind.HANDOVER: (
        "requests_handed_over",
        "Requests written down for a successor, or taken over from one before.",
    ),
}
_TENANTS = (
    ("tenant_requests", "requests", "Requests of a tenant that ended."),
    ("tenant_prompt_tokens", "prompt_tokens", "Prompt tokens of a tenant's requests that ended."),
    ("tenant_generation_tokens", "generation_tokens", "Generated tokens of a tenant's requests that ended."),
    ("tenant_rejections", "refused", "Requests of a tenant for which there was no room."),
)
ValueT = TypeVar("ValueT")
Samples: TypeAlias = Mapping[tuple[str, ...], ValueT]
"""Of a family: figures by the values of its labels."""


class EngineCollector(Collector):
    """Turns one engine's figures into metric families.

    Args:
        info: the cache's settings.
        names: `quire`, `vllm` or `both`.
    """

    def __init__(self, metrics: EngineMetrics, info: dict[str, str], names: str = "quire") -> None:
        self._metrics = metrics
        self._info = info
        self._prefixes = PREFIXES[names]

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        for prefix in self._prefixes:
            yield from self._families(prefix)

    def _families(self, prefix: str) -> Iterable[Metric]:
        metrics = self._metrics
        for name, field, text in _GAUGES if prefix == PREFIX else _GAUGES + _OLDER_GAUGES:
            yield _gauge(prefix + name, text, _LABELS, self._of_copies(_figure(field)))
        yield _gauge(
            prefix + "num_requests_waiting_by_reason",
            "Sequences in the queue: for room (capacity), or held back until something is prepared (deferred).",
            [*_LABELS, "reason"],
            self._of_copies(
                lambda copy: {
                    ("capacity",): copy.num_waiting - copy.num_deferred,
                    ("deferred",): copy.num_deferred,
                }
            ),
        )
        for name, text in COUNTERS.items():
            counted = self._of_copies(lambda copy, name=name: {(): copy.counts[name]})
            yield _counter(prefix + name, text, _LABELS, counted)
        success = self._of_copies(lambda copy: {(reason,): count for reason, count in copy.success.items()})
        yield _counter(prefix + "request_success", "Finished sequences.", [*_LABELS, "finished_reason"], success)
        rejected = {(metrics.model_name, "queue_full"): metrics.events.totals[EventKind.REFUSAL]}
        text, names = "Requests for which there was no room.", ["model_name", "reason"]
        yield _counter(prefix + "admission_rejections", text, names, rejected)
        yield from self._happenings(prefix, (metrics.model_name, str(metrics.first_copy)))
        for name, (_, text) in HISTOGRAMS.items():
            counted = self._of_copies(lambda copy, name=name: {(): copy.histograms[name]})
            yield _histogram(prefix + name, text, _LABELS, counted)
        info = {(engine, *self._info.values()): 1 for engine, _ in self._copies()}
        yield _gauge(prefix + "cache_config_info", "The cache's settings.", ["engine", *self._info], info)
        if metrics.adapters is not None:
            names = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
            told = str(metrics.max_loras), ",".join(metrics.adapters.waiting), ",".join(metrics.adapters.running)
            yield _gauge(prefix + "lora_requests_info", "Adapters in use; the time.", names, {told: time.time()})

    def _copies(self) -> list[tuple[str, EngineMetrics]]:
        """The figures of each copy of the model with its number."""
        copies = self._metrics.copies or [self._metrics]
        return [(str(number), copy) for number, copy in enumerate(copies, self._metrics.first_copy)]

    def _of_copies(self, read: Callable[[EngineMetrics], Samples[ValueT]]) -> Samples[ValueT]:
        """What is read of each copy's figures, behind the labels of the copy."""
        model = self._metrics.model_name
        return {(model, engine, *more): value for engine, copy in self._copies() for more, value in read(copy).items()}

    def _happenings(self, prefix: str, labels: tuple[str, ...]) -> Iterable[Metric]:
        """What happened besides answers, and each tenant's part."""
        for kind, (name, text) in _EVENTS.items():
            yield _counter(prefix + name, text, _LABELS, {labels: self._metrics.events.totals[kind]})
        for name, field, text in _MEDIA:
            yield _counter(prefix + name, text, _LABELS, {labels: getattr(self._metrics.media, field, 0)})
        lines = {(*labels, status): count for status, count in self._metrics.batch_lines.items()}
        yield _counter(prefix + "batch_requests", "Answered lines of batches.", [*_LABELS, "status"], lines)
        yield _counter(
            prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by place in the guess.",
            [*_LABELS, "position"],
            self._of_copies(
                lambda copy: {(str(position),): count for position, count in enumerate(copy.accepted_per_position)}
            ),
        )
        for name, field, text in _TENANTS:
            rows = list(self._metrics.tenants.rows.items())
            counts = {(*labels, tenant): getattr(row, field) for tenant, row in rows}
            yield _counter(prefix + name, text, [*_LABELS, "tenant"], counts)


def _figure(field: str) -> Callable[[EngineMetrics], Samples[Any]]:
    return lambda copy: {(): getattr(copy, field)}


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Samples[float],
) -> Metric:
    family = kind(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


_gauge, _counter = (functools.partial(_family, kind) for kind in (GaugeMetricFamily, CounterMetricFamily))


def _histogram(name: str, text: str, labels: Sequence[str], samples: Samples[Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value.cumulative(), sum_value=value.total)
    return family


class PluginCollector(Collector):
    """The metrics that plugins add; one that fails is named in the log once, and left out of the scrape."""

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        found: list[Metric] = []
        for name, families in METRICS.items():
            try:
                found += families()
            except Exception as error:
                logger.warning_once("the metrics %r of %s failed: %r", name, METRICS.entry(name).owner, error)
        return found


class PrometheusExposition:
    """A registry of its own: two servers in a process do not mix. `others` tell more than the engine's figures."""

    def __init__(
        self, metrics: EngineMetrics, info: dict[str, str], names: str = "quire", others: Sequence[Collector] = ()
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(metrics, info, names))
        for other in (*others, PluginCollector()):
            self.registry.register(other)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def exposition(self) -> tuple[bytes, str]:
        """The text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE


def cache_info(cache_config: CacheConfig) -> dict[str, str]:
    """The cache's settings as labels."""
    return {field.name: str(getattr(cache_config, field.name)) for field in dataclasses.fields(cache_config)}


DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NO_ROUTE = "none"


class HttpMetrics(Collector):
    """Counts for one server."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._prefixes: list[tuple[str, str]] = []
        self._counts: dict[tuple[str, str, str], int] = {}
        self._durations: dict[tuple[str, str], Histogram] = {}

    def watch(self, templates: Iterable[str]) -> None:
        """These are the server's routes; a part in braces matches any text."""
        templates = [path.replace(":path}", "}") for path in templates]
        self._paths |= {path for path in templates if "{" not in path}
        self._prefixes += [(path.partition("{")[0], path) for path in templates if "{" in path]

    def record(self, path: str, method: str, status: int, seconds: float) -> None:
        """A request was answered; `status` is 0 where its client had gone."""
        route = self._route(path)
        answer = (route, method if route != NO_ROUTE else "", f"{status // 100}xx")
        self._counts[answer] = self._counts.get(answer, 0) + 1
        if route != NO_ROUTE:
            histogram = self._durations.get((route, method))
            if histogram is None:
                histogram = self._durations[route, method] = Histogram(DURATION_BOUNDS)
            histogram.observe(seconds)

    def _route(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((template for prefix, template in self._prefixes if path.startswith(prefix)), NO_ROUTE)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        yield _counter("http_requests", "Answered requests.", ["handler", "method", "status"], self._counts)
        yield _histogram(
            "http_request_duration_seconds",
            "From a request to the end of its answer.",
            ["handler", "method"],
            self._durations,
        )
