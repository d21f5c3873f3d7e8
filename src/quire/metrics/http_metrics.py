"""What HTTP requests add up to: how many by route and kind of answer, and how long they took. Names are those of FastAPI's usual
instrumentation.

Knows paths and numbers. A path that is no route is counted as `none`, so that a client cannot make labels.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.metrics.engine_metrics import Histogram

DURATION_BOUNDS = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NO_ROUTE = "none"


class HttpMetrics(Collector):
    """Counts for one server."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._prefixes: list[tuple[str, str]] = []
        self._counts: dict[tuple[str, str, str], int] = {}
        self._durations: dict[tuple[str, str], Histogram] = {}

    def watch(self, templates: Iterable[str]) -> None:
        """These are the server's routes; a part in braces stands for any text."""
        templates = [path.replace(":path}", "}") for path in templates]
        self._paths |= {path for path in templates if "{" not in path}
        self._prefixes += [(path.partition("{")[0], path) for path in templates if "{" in path]

    def record(self, path: str, method: str, status: int, seconds: float) -> None:
        """A request was answered; `status` is 0 where its client had gone."""
        route = self._route(path)
        answer = (route, method if route != NO_ROUTE else "", f"{status // 100}xx")
        self._counts[answer] = self._counts.get(answer, 0) + 1
        if route != NO_ROUTE:
            self._durations.setdefault((route, method), Histogram(DURATION_BOUNDS)).observe(seconds)

    def _route(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((template for prefix, template in self._prefixes if path.startswith(prefix)), NO_ROUTE)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        requests = CounterMetricFamily("http_requests", "Answered requests.", labels=["handler", "method", "status"])
        for labels, count in self._counts.items():
            requests.add_metric(labels, count)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "From a request to the end of its answer.", labels=["handler", "method"]
        )
        for labels, histogram in self._durations.items():
            durations.add_metric(labels, histogram.cumulative(), sum_value=histogram.total)
        yield durations
