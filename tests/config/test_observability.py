"""From flags to what is measured and logged."""

import pytest

from quire.config import ObservabilityConfig
from quire.config.observability import ProfilerConfig
from quire.engine.arg_resolve import UsageContext
from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs
from quire.errors import ConfigError
from quire.metrics.engine_metrics import EngineMetrics


def test_by_default_figures_are_logged_and_nothing_of_single_requests(monkeypatch):
    monkeypatch.delenv("QUIRE_LOG_STATS_INTERVAL", raising=False)
    assert AsyncEngineArgs().create_engine_config().observability == ObservabilityConfig()


def test_every_setting_arrives():
    args = AsyncEngineArgs(
        disable_log_stats=True,
        log_stats_interval=2.5,
        enable_log_requests=True,
        enable_log_outputs=True,
        log_prompts=True,
        max_log_len=7,
        otlp_traces_endpoint="http://127.0.0.1:4317",
        profiler_config={"torch_profiler_dir": "d", "max_iterations": 3},
    )
    assert args.create_engine_config().observability == ObservabilityConfig(
        disable_log_stats=True,
        log_stats_interval_s=2.5,
        enable_log_requests=True,
        enable_log_outputs=True,
        log_prompts=True,
        max_log_len=7,
        otlp_traces_endpoint="http://127.0.0.1:4317",
        profiler=ProfilerConfig(dir="d", max_iterations=3),
    )


def test_the_interval_of_figures_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "4")
    assert EngineArgs().create_engine_config().observability.log_stats_interval_s == 4.0
    assert EngineArgs(log_stats_interval=5).create_engine_config().observability.log_stats_interval_s == 5.0


def test_timelines_are_kept_for_servers_unless_they_are_turned_off():
    def keeps(usage: UsageContext, **settings: bool) -> bool:
        return EngineArgs(**settings).create_engine_config(usage).scheduler.record_timelines

    assert keeps(UsageContext.API_SERVER) and not keeps(UsageContext.LLM_CLASS)
    assert not keeps(UsageContext.API_SERVER, record_timelines=False)


def test_histograms_have_the_bounds_that_are_asked_for():
    asked = {"request_latency": [0.5, 2], "request_tokens": [10]}
    config = EngineArgs(custom_histogram_buckets=asked).create_engine_config().observability
    metrics = EngineMetrics("m", 100, config.custom_histogram_buckets)
    (copy,) = metrics.divide(1)
    for each in (metrics, copy):
        bounds = {name: histogram.bounds for name, histogram in each.histograms.items()}
        assert bounds["e2e_request_latency_seconds"] == bounds["request_queue_time_seconds"] == (0.5, 2.0)
        assert bounds["request_params_max_tokens"] == (10.0,)
        usual = EngineMetrics("m", 100).histograms["time_to_first_token_seconds"]
        assert bounds["time_to_first_token_seconds"] == usual.bounds


@pytest.mark.parametrize(
    "wrong", [{"request_time": [1]}, *({"request_latency": bad} for bad in ([], [2, 1], [0, 1], [1, 1], 5, ["a"], "1"))]
)
def test_bounds_that_are_none_are_refused(wrong):
    with pytest.raises(ConfigError, match="custom_histogram_buckets"):
        EngineArgs(custom_histogram_buckets=wrong).create_engine_config()
