"""Histograms, the engine's figures, their Prometheus text, and the log's line."""

import bisect
import dataclasses
import json
import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quire.config import CacheConfig
from quire.metrics.engine_metrics import EngineMetrics, FinishedRequest, Histogram, StatsLogger, steps_1_2_5
from quire.metrics.events import EventKind
from quire.metrics.prometheus import PREFIX, PrometheusExposition, cache_info
from quire.metrics.tenants import MOST_TENANTS, TenantFigures
from quire.request import SchedulerStats


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
def test_a_histogram_counts_what_lies_at_or_below_each_bound(observations):
    histogram = Histogram((1.0, 5.0, 10.0))
    for value, count in observations:
        histogram.observe(value, count)
    values = sorted(value for value, count in observations for _ in range(count))
    expected = [bisect.bisect_right(values, bound) for bound in (1.0, 5.0, 10.0)] + [len(values)]
    assert [count for _, count in histogram.cumulative()] == expected
    assert histogram.count == len(values) and histogram.total == pytest.approx(sum(values))


def test_bounds_must_ascend():
    with pytest.raises(ValueError, match="ascend"):
        Histogram((1.0, 1.0))


def test_length_bounds_are_1_2_5_up_to_the_limit():
    assert steps_1_2_5(120) == [1, 2, 5, 10, 20, 50, 100]


def filled() -> EngineMetrics:
    metrics = EngineMetrics("m", 100)
    metrics.record_step(
        SchedulerStats(
            num_running=3,
            num_waiting=2,
            num_total_blocks=10,
            num_free_blocks=4,
            num_preemptions=1,
            prefix_cache_queries=8,
            prefix_cache_hits=6,
            num_batched_tokens=16,
            num_iteration_tokens=17,
            step_ms=4.0,
        )
    )
    metrics.record_first_token(0.03, num_prompt_tokens=12)
    metrics.record_next_tokens(0.02)
    metrics.record_next_tokens(0.04, count=2)
    finished = FinishedRequest("stop", 12, 4, 0.03, 0.06, 0.09, max_tokens=16)
    finished.num_cached_tokens, finished.scheduled, finished.most_tokens = 8, 0.01, 4
    metrics.record_finished(finished)
    return metrics


def samples(metrics: EngineMetrics, names: str = "quire") -> dict[str, float]:
    body, content_type = PrometheusExposition(metrics, cache_info(CacheConfig()), names).exposition()
    assert content_type.startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            shown = {k: v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine")}
            labels = ",".join(f"{k}={v}" for k, v in shown.items())
            assert sample.labels.get("model_name", "m") == "m"
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_every_figure_is_exposed_under_its_name():
    found = samples(filled())
    expected = {
        "num_requests_running{}": 3,
        "num_requests_waiting{}": 2,
        "num_requests_waiting_by_reason{reason=capacity}": 2,
        "num_requests_waiting_by_reason{reason=deferred}": 0,
        "request_num_preemptions_count{}": 1,
        "kv_cache_usage_perc{}": 0.6,
        "num_preemptions_total{}": 1,
        "prefix_cache_queries_total{}": 8,
        "prefix_cache_hits_total{}": 6,
        "prompt_tokens_total{}": 12,
        "generation_tokens_total{}": 4,
        "request_success_total{finished_reason=stop}": 1,
        "request_success_total{finished_reason=abort}": 0,
        "iteration_tokens_total_sum{}": 17,
        "time_to_first_token_seconds_count{}": 1,
        "inter_token_latency_seconds_count{}": 3,
        "e2e_request_latency_seconds_sum{}": 0.09,
        "time_per_output_token_seconds_bucket{le=0.025}": 1,
        "request_time_per_output_token_seconds_sum{}": 0.02,
        "request_prompt_tokens_bucket{le=20.0}": 1,
        "request_generation_tokens_bucket{le=2.0}": 0,
        "request_generation_tokens_bucket{le=+Inf}": 1,
        "request_params_max_tokens_sum{}": 16,
        "request_params_n_count{}": 1,
        "step_time_seconds_sum{}": 0.004,
        "request_queue_time_seconds_sum{}": 0.01,
        "request_prefill_time_seconds_sum{}": 0.02,
        "request_decode_time_seconds_sum{}": 0.06,
        "request_inference_time_seconds_sum{}": 0.08,
        "request_prefill_kv_computed_tokens_sum{}": 4,
        "request_max_num_generation_tokens_sum{}": 4,
        "prompt_tokens_cached_total{}": 8,
        "admission_rejections_total{reason=queue_full}": 0,
    }
    assert {name: found[PREFIX + name] for name in expected} == pytest.approx(expected)


def test_the_same_figures_stand_under_the_names_of_vllm():
    ours, theirs, both = (samples(filled(), names) for names in ("quire", "vllm", "both"))
    figures = {name.removeprefix(PREFIX): value for name, value in ours.items() if name.startswith(PREFIX)}
    vllm = {name.removeprefix("vllm:"): value for name, value in theirs.items() if name.startswith("vllm:")}
    assert vllm.pop("gpu_cache_usage_perc{}") == vllm["kv_cache_usage_perc{}"] == 0.6
    assert figures and figures == vllm
    assert not any(name.startswith(PREFIX) for name in theirs)
    assert {name for name in both if ":" in name} == {name for name in {**ours, **theirs} if ":" in name}


def test_what_boards_made_for_vllm_ask_for_is_there():
    found = {name.split("{")[0] for name in samples(filled(), "vllm")}
    parts = (
        "e2e_request_latency time_to_first_token inter_token_latency time_per_output_token request_queue_time",
        "request_prefill_time request_decode_time request_inference_time",
    )
    histograms = {f"{name}_seconds" for part in parts for name in part.split()}
    histograms |= {"request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"}
    histograms |= {"iteration_tokens_total", "request_params_n", "request_params_max_tokens"}
    others = {"prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting"}
    others |= {"kv_cache_usage_perc", "gpu_cache_usage_perc", "request_success_total", "num_preemptions_total"}
    others |= {"prefix_cache_queries_total", "prefix_cache_hits_total", "cache_config_info"}
    wanted = {f"vllm:{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    assert wanted | {f"vllm:{name}" for name in others} <= found


def test_every_expression_of_the_board_names_figures_that_there_are():
    board = json.loads((files("quire") / "assets" / "grafana" / "quire.json").read_text())
    found = {name.split("{")[0] for name in samples(filled())}
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    expressions += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    assert len(expressions) > 20
    for expression in expressions:
        named = re.findall(r"quire:\w+", expression)
        assert named and set(named) <= found, expression
        assert expression.count("(") == expression.count(")")


def test_a_request_for_which_there_was_no_room_is_counted():
    metrics = EngineMetrics("m", 100)
    metrics.record_refusal("the queue is full", "a")
    found = samples(metrics)
    assert found[PREFIX + "admission_rejections_total{reason=queue_full}"] == 1
    assert found[PREFIX + "tenant_rejections_total{tenant=a}"] == 1
    assert [event.text for event in metrics.events.latest()] == ["the queue is full"]


def test_what_happened_besides_answers_is_counted():
    metrics = EngineMetrics("m", 100)
    names = {
        EventKind.RESTART: "engine_restarts",
        EventKind.HANG: "engine_hangs",
        EventKind.REPLAY: "requests_replayed",
        EventKind.GIVEN_UP: "requests_given_up",
        EventKind.DEADLINE: "request_deadlines_missed",
        EventKind.HANDOVER: "requests_handed_over",
    }
    for count, kind in enumerate(names, 1):
        metrics.events.add(kind, "it happened", count)
    found = samples(metrics)
    assert [found[f"{PREFIX}{name}_total{{}}"] for name in names.values()] == [1, 2, 3, 4, 5, 6]


def test_tenants_have_rows_of_their_own_up_to_a_bound():
    metrics = EngineMetrics("m", 100)
    for tenant in ["", "a", *(f"t{number}" for number in range(MOST_TENANTS))]:
        ended = FinishedRequest("stop", 10, 3, scheduled=0.1, most_tokens=3, tenant=tenant)
        metrics.record_finished(dataclasses.replace(ended, most_tokens=None))  # the first of two sequences
        metrics.record_finished(ended)
    metrics.record_finished(FinishedRequest("abort", 10, 0, tenant="a"))  # it never ran
    assert len(metrics.tenants.rows) == MOST_TENANTS + 1
    assert metrics.tenants.rows["a"] == metrics.tenants.rows["default"] == TenantFigures(1, 10, 6, 0)
    assert metrics.tenants.rows["other"] == TenantFigures(2, 20, 12, 0)
    assert samples(metrics)[PREFIX + "tenant_generation_tokens_total{tenant=other}"] == 12


def test_counters_add_up_over_steps():
    metrics = filled()
    metrics.record_step(SchedulerStats(num_preemptions=2, prefix_cache_queries=1))
    assert (
        metrics.counts["num_preemptions"],
        metrics.counts["prefix_cache_queries"],
        metrics.counts["engine_steps"],
    ) == (3, 9, 1)
    assert metrics.num_running == 0


def test_a_request_that_never_got_a_token_counts_as_finished_alone():
    metrics = EngineMetrics("m", 100)
    metrics.record_finished(FinishedRequest("abort", 5, 0, end_to_end=1.0))
    counts = {name: histogram.count for name, histogram in metrics.histograms.items()}
    assert metrics.success["abort"] == 1 and counts["e2e_request_latency_seconds"] == 1
    assert counts["request_decode_time_seconds"] == counts["request_time_per_output_token_seconds"] == 0


def test_two_engines_do_not_share_figures():
    first, second = filled(), EngineMetrics("m", 100)
    assert samples(first) != samples(second)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_log_line_comes_once_an_interval_while_there_is_work():
    clock = Clock()
    metrics = filled()
    logger = StatsLogger(metrics, 10.0, clock)
    clock.now = 9.0
    assert logger.tick() is None
    clock.now = 10.0
    line = logger.tick()
    assert line is not None
    assert "prompt 1.2, generation 0.4 tokens/s" in line and "running 3, waiting 2" in line
    assert "KV cache 60.0%" in line and "prefix hits 75.0%" in line
    assert logger.tick() is None
    clock.now = 20.0
    line = logger.tick()
    assert line is not None and "generation 0.0" in line and "prefix hits" not in line


def test_after_an_idle_time_the_rates_start_afresh():
    clock = Clock()
    metrics = filled()
    logger = StatsLogger(metrics, 10.0, clock)
    clock.now = 3600.0
    assert logger.tick() is None
    clock.now = 3611.0
    line = logger.tick()
    assert line is not None and "prompt 0.0" in line
