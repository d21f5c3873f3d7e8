"""Prompts, percentiles, arrival times and the figures of `quire bench serve`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.benchmarks import common
from quire.benchmarks.http_load import RequestFigures, Target, _carries_text
from quire.benchmarks.serve import arrival_times, build_figures
from quire.errors import ConfigError


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, share):
    assert common.percentile(values, share) == pytest.approx(float(np.percentile(values, share)), abs=1e-6)


def test_random_prompts_have_their_lengths_their_prefix_and_their_seed():
    lengths = [5, 9, 3]
    prompts = common.random_prompts(3, lengths, 100, seed=1, prefix_len=4)
    assert [len(prompt) for prompt in prompts] == lengths
    assert prompts[0][:4] == prompts[1][:4] and prompts[0][:2] == prompts[2][:2]
    assert all(10 <= token < 90 for prompt in prompts for token in prompt)
    assert prompts == common.random_prompts(3, lengths, 100, seed=1, prefix_len=4)
    assert prompts != common.random_prompts(3, lengths, 100, seed=2, prefix_len=4)


def test_lengths_stay_within_their_range():
    lengths = common.random_lengths(200, 100, 0.5, seed=0)
    assert min(lengths) >= 50 and max(lengths) <= 150 and len(set(lengths)) > 10
    assert set(common.random_lengths(5, 7, 0.0, seed=0)) == {7}


def test_arrivals_are_at_once_or_at_the_asked_rate():
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0] * 3
    times = arrival_times(4000, 20.0, 1.0, 0)
    assert times[0] == 0.0 and times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(20.0, rel=0.1)
    gaps, steady = np.diff(times), np.diff(arrival_times(4000, 20.0, 50.0, 0))
    assert gaps.std() == pytest.approx(0.05, rel=0.15) and steady.std() < gaps.std() / 4


def test_figures_of_serving_come_from_the_moments_of_events():
    good = RequestFigures(
        sent=1.0, prompt_tokens=7, event_times=[1.1, 1.2, 1.4], finished=1.5, output_tokens=4, status=200
    )
    bad = RequestFigures(sent=1.0, prompt_tokens=7, finished=1.2, error="status 429: full")
    figures = build_figures([good, bad], 2.0, "m", float("inf"))
    assert (figures["completed"], figures["failed"], figures["first_error"]) == (1, 1, "status 429: full")
    assert figures["output_tokens_per_second"] == 2.0 and figures["input_tokens"] == 7
    assert figures["ttft_ms"]["p50"] == pytest.approx(100)
    assert figures["tpot_ms"]["p50"] == pytest.approx(100)
    assert figures["itl_ms"]["max"] == pytest.approx(200)
    assert figures["e2e_ms"]["mean"] == pytest.approx(500)


def test_chunks_with_text_are_told_from_others():
    assert _carries_text(b'{"choices":[{"index":0,"delta":{"content":"a"}}]}')
    assert _carries_text(b'{"choices": [{"text": "a"}]}')
    assert not _carries_text(b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}')
    assert not _carries_text(b'{"choices":[],"usage":{}}')


def test_addresses_are_checked():
    assert Target.parse("http://h:1/base/").base_path == "/base"
    assert Target.parse("https://h").port == 443
    for url in ("h:1", "ftp://h", "http://", "http://h:x"):
        with pytest.raises(ConfigError, match="base_url"):
            Target.parse(url)
