"""What a load's moments mean."""

import random

import numpy as np
import pytest

from quire.benchmarks.http_load import RequestRecord
from quire.benchmarks.serve_metrics import (
    build_figures,
    detailed,
    measure_request,
    meets,
    parse_goodput,
    peak_concurrency,
    peak_output_tokens,
)
from quire.errors import ConfigError


def record(sent: float, times: list[float], tokens: int | None = None, **fields) -> RequestRecord:
    """A success whose last event was its last token."""
    end = times[-1] if times else sent
    return RequestRecord(sent, times, end, end + 0.01, fields.pop("inputs", 7), tokens or len(times), **fields)


def test_latencies_of_one_request():
    one = measure_request(record(1.0, [1.1, 1.2, 1.4], 4), None)
    assert one.ttft == pytest.approx(100) and one.e2el == pytest.approx(400)
    assert one.tpot == pytest.approx(300 / 3) and one.itl == pytest.approx([100, 200])
    assert (one.input_tokens, one.output_tokens) == (7, 4)


def test_an_answer_of_one_token_has_no_time_per_further_token():
    one = measure_request(record(0.0, [0.5]), None)
    assert one.tpot is None and one.itl == [] and one.ttft == one.e2el == pytest.approx(500)
    assert meets(one, {"tpot": 0.001, "ttft": 500.0}) and not meets(one, {"ttft": 499.0})


def test_an_answer_in_one_event_tells_nothing_of_further_tokens_and_the_figures_show_it():
    assert measure_request(record(0.0, [0.5], 16), None).tpot is None
    assert build_figures([record(0.0, [0.5], 16), record(0.0, [0.1, 0.2], 4)], [None] * 2, 0.0)[
        "tokens_per_event"
    ] == pytest.approx(20 / 3)


def test_an_end_after_the_last_text_counts_for_the_whole_and_not_for_gaps():
    late = RequestRecord(0.0, [0.1, 0.2], 0.3, 0.31, 5, 3)
    one = measure_request(late, None)
    assert one.e2el == pytest.approx(300) and one.tpot == pytest.approx(100) and one.itl == pytest.approx([100])


def test_what_the_server_did_not_count_is_counted_by_events_and_by_the_plan():
    one = measure_request(RequestRecord(0.0, [0.1, 0.2], 0.2, 0.2), 9)
    assert (one.input_tokens, one.output_tokens) == (9, 2)


def test_statistics_are_numpys():
    source = random.Random(3)
    records = []
    for _ in range(57):
        sent = source.random()
        records.append(record(sent, list(np.cumsum([sent + source.random(), *(source.random() for _ in range(5))]))))
    figures = build_figures(records, [None] * 57, 0.0, shares=(50, 90, 99.9))
    ttfts = np.array([one.event_times[0] - one.sent for one in records]) * 1000
    itls = np.array([np.diff(one.event_times) for one in records]).ravel() * 1000
    for name, values in (("ttft", ttfts), ("itl", itls)):
        assert figures[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert figures[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert figures[f"std_{name}_ms"] == pytest.approx(values.std())
        for share, key in ((50, "p50"), (90, "p90"), (99.9, "p99.9")):
            assert figures[f"{key}_{name}_ms"] == pytest.approx(np.percentile(values, share))


def test_throughput_counts_successes_and_goodput_those_that_keep_every_level():
    records = [
        record(0.0, [0.1, 0.2, 0.3]),
        record(0.0, [0.5, 0.6, 0.7]),
        record(0.0, [0.1, 1.0, 1.99]),
        RequestRecord(0.0, finished=0.1, error="status 429: full"),
    ]
    levels = parse_goodput(["ttft:200", "tpot:500"])
    figures = build_figures(records, [None] * 4, 0.0, levels=levels)
    assert figures["duration"] == pytest.approx(2.0)
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert figures["request_throughput"] == pytest.approx(1.5) and figures["request_goodput"] == pytest.approx(0.5)
    assert figures["output_throughput"] == pytest.approx(4.5) and figures["total_token_throughput"] == pytest.approx(
        15.0
    )
    assert build_figures(records, [None] * 4, 0.0)["request_goodput"] is None


def test_a_run_without_a_success_has_figures_of_nothing():
    figures = build_figures([RequestRecord(0.0, finished=1.0, error="x")], [3], 0.0)
    assert figures["completed"] == 0 and figures["median_ttft_ms"] == 0.0 and figures["output_throughput"] == 0.0


@pytest.mark.parametrize("word", ["itl:5", "ttft", "ttft:", "ttft:abc", "ttft:0", "ttft:nan"])
def test_service_levels_that_are_none_are_refused(word):
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([word])


def test_the_peak_second_takes_each_events_share_of_its_tokens():
    records = [record(0.0, [0.2, 0.9, 1.1, 1.2], 8), record(0.0, [1.5], 3)]
    assert peak_output_tokens(records, 0.0) == 2 + 2 + 3
    assert peak_output_tokens([], 0.0) == 0.0


def test_peak_concurrency_is_the_most_that_overlap():
    spans = [(0.0, 1.0), (0.5, 2.0), (1.0, 3.0), (2.5, 2.6)]
    assert peak_concurrency([RequestRecord(sent, finished=end) for sent, end in spans]) == 2
    assert peak_concurrency([RequestRecord(0.0, finished=0.0)] * 3) == 3


def test_details_keep_the_order_and_the_errors():
    records = [record(1.0, [1.5, 2.0], text="ab"), RequestRecord(1.0, finished=1.1, error="gone")]
    columns = detailed(records, [None, 4], 1.0)
    assert columns["ttfts"] == [0.5, 0.0] and columns["itls"] == [[0.5], []] and columns["errors"] == ["", "gone"]
    assert columns["input_lens"] == [7, 4] and columns["output_lens"] == [2, 0]
    assert columns["generated_texts"] == ["ab", ""] and columns["start_times"] == [0.0, 0.0]
