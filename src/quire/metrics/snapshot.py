"""An engine's figures as plain objects, for programs that read them offline (`LLM.get_metrics`).

The names, kinds and labels are those that Prometheus gets, without its suffixes (`_total`, `_bucket` …).
"""

import dataclasses
from typing import Any

from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.prometheus import EngineCollector


@dataclasses.dataclass
class Metric:
    """A figure: its name, for example `quire:num_requests_running`, and its labels."""

    name: str
    labels: dict[str, str]


@dataclasses.dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclasses.dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclasses.dataclass
class Histogram(Metric):
    """How many observations were at or below each bound.

    Attributes:
        count: all observations; sum: of their values.
        buckets: upper bound, as Prometheus writes it, to observations at or below it; the last is `+Inf`.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def take_snapshot(metrics: EngineMetrics, info: dict[str, str], names: str = "quire") -> list[Metric]:
    """The figures of now.

    Args:
        info: the cache's settings, which `cache_config_info` has as labels.
        names: the names' prefix: `quire`, `vllm` or `both`.
    """
    found: list[Metric] = []
    for family in EngineCollector(metrics, info, names).collect():
        if family.type == "histogram":
            found += _histograms(family)
            continue
        for sample in family.samples:
            if family.type == "counter":
                found.append(Counter(family.name, dict(sample.labels), int(sample.value)))
            else:
                found.append(Gauge(family.name, dict(sample.labels), float(sample.value)))
    return found


def _histograms(family: Any) -> list[Histogram]:
    """One for each copy of the model: its samples are buckets, their count and the values' sum."""
    by_engine: dict[str, list[Any]] = {}
    for sample in family.samples:
        by_engine.setdefault(sample.labels["engine"], []).append(sample)
    found: list[Histogram] = []
    for samples in by_engine.values():
        values = {sample.name.removeprefix(family.name): sample for sample in samples}
        buckets = {sample.labels["le"]: int(sample.value) for sample in samples if sample.name.endswith("_bucket")}
        count = values["_count"]
        labels = dict(count.labels)
        found.append(Histogram(family.name, labels, int(count.value), float(values["_sum"].value), buckets))
    return found
