"""`EngineMetrics` in Prometheus' text format: the meanings of vLLM's metrics, under the prefix `quire:`.

Figures are kept by `EngineMetrics` and turned into samples only when somebody asks.
"""

import dataclasses
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.config import CacheConfig
from quire.metrics.engine_metrics import EngineMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "quire:"

_GAUGES = (
    ("num_requests_running", "num_running", "Sequences that hold a row of the batch."),
    ("num_requests_waiting", "num_waiting", "Sequences in the queue."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of the KV cache's pages in use; 1 is all of them."),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that reached their first token."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("num_preemptions", "num_preemptions", "Times that a running sequence gave up its pages."),
    ("prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
    ("engine_steps", "num_steps", "Steps that computed at least one token."),
)
_HISTOGRAMS = (
    ("iteration_tokens_total", "iteration_tokens", "Tokens computed in a step."),
    ("time_to_first_token_seconds", "time_to_first_token", "From arrival to the first token."),
    ("inter_token_latency_seconds", "inter_token_latency", "Between two tokens of a sequence."),
    (
        "request_time_per_output_token_seconds",
        "time_per_output_token",
        "A sequence's mean time a token after its first.",
    ),
    ("time_per_output_token_seconds", "time_per_output_token", "The same, under its older name."),
    ("e2e_request_latency_seconds", "end_to_end", "From arrival to the end."),
    ("request_decode_time_seconds", "decode_time", "From the first token to the last."),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a finished sequence."),
    ("request_generation_tokens", "request_generation_tokens", "Tokens that a finished sequence generated."),
    ("request_params_max_tokens", "request_max_tokens", "max_tokens of finished requests."),
    ("request_params_n", "request_n", "n of finished requests."),
)


class EngineCollector(Collector):
    """Turns one engine's figures into metric families."""

    def __init__(self, metrics: EngineMetrics, info: dict[str, str]) -> None:
        self._metrics = metrics
        self._info = info

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        label = self._metrics.model_name
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([label], getattr(self._metrics, field))
            yield gauge
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([label], getattr(self._metrics, field))
            yield counter
        success = CounterMetricFamily(
            PREFIX + "request_success", "Finished sequences.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._metrics.success.items():
            success.add_metric([label, reason], count)
        yield success
        for name, field, text in _HISTOGRAMS:
            histogram = getattr(self._metrics, field)
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([label], histogram.cumulative(), sum_value=histogram.total)
            yield family
        info = GaugeMetricFamily(PREFIX + "cache_config_info", "The cache's settings.", labels=[*self._info])
        info.add_metric([*self._info.values()], 1)
        yield info


class PrometheusExposition:
    """A registry of its own: two servers in a process do not mix."""

    def __init__(self, metrics: EngineMetrics, info: dict[str, str]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(metrics, info))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def exposition(self) -> tuple[bytes, str]:
        """The text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE


def cache_info(cache_config: CacheConfig) -> dict[str, str]:
    """The cache's settings as labels."""
    return {field.name: str(getattr(cache_config, field.name)) for field in dataclasses.fields(cache_config)}
