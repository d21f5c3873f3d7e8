"""Arrival times: their rate, their spread, ramps and bursts."""

import math

import numpy as np
import pytest

from quire.benchmarks.arrivals import Arrivals
from quire.errors import ConfigError


def gaps(arrivals: Arrivals, count: int = 4001, seed: int = 0) -> np.ndarray:
    return np.diff(arrivals.times(count, seed))


def test_without_a_rate_all_come_at_once():
    assert Arrivals().times(3, 0) == [0.0] * 3


def test_the_rate_is_the_one_asked_for_whatever_the_seed():
    for seed in range(3):
        times = Arrivals(rate=20.0).times(101, seed)
        assert times[0] == 0.0 and times == sorted(times)
        assert times[-1] == pytest.approx(100 / 20.0)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_their_gamma_distribution(shape):
    drawn = gaps(Arrivals(rate=50.0, burstiness=shape), count=20001)
    assert drawn.mean() == pytest.approx(1 / 50)
    assert drawn.std() / drawn.mean() == pytest.approx(1 / math.sqrt(shape), rel=0.05)


def test_poisson_gaps_are_exponential():
    drawn = np.sort(gaps(Arrivals(rate=10.0), count=20001))
    expected = 1 - np.exp(-drawn * 10.0)
    seen = np.arange(1, len(drawn) + 1) / len(drawn)
    assert np.abs(seen - expected).max() < 1.36 / math.sqrt(len(drawn))  # Kolmogorov-Smirnov, 5 %


def test_infinite_burstiness_is_even():
    assert gaps(Arrivals(rate=8.0, burstiness=math.inf), count=9) == pytest.approx(1 / 8)


def test_a_seed_gives_the_same_times_again_and_another_gives_others():
    assert Arrivals(rate=5.0).times(20, 1) == Arrivals(rate=5.0).times(20, 1) != Arrivals(rate=5.0).times(20, 2)


def test_bursts_come_together_at_the_same_rate_of_requests():
    times = Arrivals(rate=100.0, burst_size=4).times(401, 0)
    assert times[:4] == [0.0] * 4 and times[4] > 0 and len(set(times)) == 101
    assert times[-1] == pytest.approx(4.0)


def test_a_ramp_goes_from_the_first_rate_to_the_last():
    linear = gaps(Arrivals(burstiness=math.inf, ramp="linear", start_rate=1.0, end_rate=11.0), count=11)
    assert linear == pytest.approx([1 / (1 + 10 * i / 10) for i in range(1, 11)])
    exponential = gaps(Arrivals(burstiness=math.inf, ramp="exponential", start_rate=1.0, end_rate=16.0), count=5)
    assert exponential == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16])


def test_a_ramp_may_start_at_nothing_and_takes_its_random_gaps_from_the_seed():
    times = Arrivals(ramp="linear", start_rate=0.0, end_rate=50.0).times(200, 3)
    assert all(map(math.isfinite, times)) and times == sorted(times)
    early, late = times[100] - times[0], times[-1] - times[100]
    assert early > late


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"rate": 0.0}, "request_rate"),
        ({"rate": math.nan}, "request_rate"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"ramp": "linear", "start_rate": 1.0}, "ramp_up_strategy"),
        ({"start_rate": 1.0}, "ramp_up_strategy"),
        ({"ramp": "exponential", "start_rate": 0.0, "end_rate": 2.0}, "ramp_up_start_rps"),
        ({"ramp": "linear", "start_rate": 1.0, "end_rate": 2.0, "rate": 3.0}, "request_rate"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, setting):
    with pytest.raises(ConfigError) as refusal:
        Arrivals(**fields)
    assert refusal.value.setting == setting
