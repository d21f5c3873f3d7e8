"""What counters have gained within the last hour."""

from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.history import LastHour


def test_what_is_older_than_an_hour_is_not_counted() -> None:
    now, counted = 0.0, {"x": 0.0}
    hour = LastHour(lambda: dict(counted), lambda: now)
    assert hour.gains() == (0.0, {"x": 0.0})
    for minute in range(120):
        now = 60.0 * minute
        hour.note()
        counted["x"] += 1
        hour.note()
    assert hour.gains() == (3600.0, {"x": 61.0}), "to a minute"
    now += 1800.0
    assert hour.gains() == (3600.0, {"x": 31.0})
    now += 1801.0
    assert hour.gains() == (3600.0, {"x": 0.0})
    counted["x"] += 5
    hour.note()
    assert hour.gains()[1]["x"] == 6.0, "the five, and what the last minute before had"


def test_an_engines_counters_have_prometheus_names() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.record_refusal("full")
    seconds, gains = metrics.last_hour.gains()
    assert seconds >= 0.0 and gains["admission_rejections_total"] == 1.0
    assert set(gains) == set(metrics.counters()) >= {"num_preemptions_total", "request_queue_time_seconds_sum"}
