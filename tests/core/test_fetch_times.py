"""Fetching or computing: what is slower than computing is not fetched, nor waited for longer, and is tried again later."""

from quire.core.cost_model import MIN_OBSERVATIONS, CostModel
from quire.core.fetch_times import SLACK_S, FetchTimes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def a_model(ms_a_token: float = 1.0) -> CostModel:
    """One that has seen prompts, of which each token takes so long."""
    model = CostModel()
    for count in range(16, 16 + 2 * MIN_OBSERVATIONS):
        model.observe(16 * count, 1, 0.0, ms_a_token * 16 * count)
    return model


def fetched(times: FetchTimes, clock: Clock, num_tokens: int, seconds: float) -> None:
    times.begin("a", num_tokens, 0)
    clock.now += seconds
    times.late()  # the core looks again and again
    times.end("a", has_come=True)


def test_what_has_come_faster_than_it_is_computed_is_fetched_and_nothing_else() -> None:
    clock = Clock()
    times = FetchTimes(a_model(), 2048, clock)
    assert times.pays(1000, 0)  # nobody knows how fast it is
    fetched(times, clock, 1000, 0.5)
    assert times.pays(1000, 0) and times.pays(100, 5000)
    fetched(times, clock, 1000, 3.0)
    assert not times.pays(1000, 0)
    assert times.pays(4, 0)  # the difference is not worth a thought


def test_everything_is_fetched_until_the_cost_of_prompts_is_known() -> None:
    clock, model = Clock(), CostModel()
    times = FetchTimes(model, 2048, clock)
    for sequences in range(1, 200):  # answers alone tell nothing of prompts
        model.observe(sequences, sequences, 0.0, 1.0 + sequences)
    fetched(times, clock, 1000, 1000.0)
    assert model.is_ready and times.pays(1000, 0)
    times.begin("b", 1000, 0)
    clock.now += 1e6
    assert times.late() == []


def test_a_fetch_is_waited_for_as_long_as_computing_takes() -> None:
    clock = Clock()
    times = FetchTimes(a_model(), 2048, clock)
    times.begin("a", 1000, 0)
    times.begin("b", 4000, 0)
    clock.now += 1.0 + 2 * SLACK_S
    assert times.late() == ["a"] and times.late() == [] and "a" in times
    assert not times.pays(100_000, 0)  # so slow at least is what has not come
    clock.now += 3.0
    assert times.late() == ["b"]
    times.end("a", has_come=False)
    assert "a" not in times and "b" in times


def test_a_place_that_was_slow_is_tried_again() -> None:
    clock = Clock()
    times = FetchTimes(a_model(), 2048, clock)
    fetched(times, clock, 1000, 4.0)
    refused = 0
    while not times.pays(1000, 0):
        refused += 1
    assert 5 < refused < 50
    fetched(times, clock, 1000, 0.01)
    assert times.pays(1000, 0)


def test_what_comes_while_a_long_step_runs_is_not_slow() -> None:
    clock = Clock()
    times = FetchTimes(a_model(), 2048, clock)
    times.late()
    times.begin("a", 1000, 0)
    clock.now += 60.0
    times.end("a", has_come=True)
    assert times.pays(1_000_000, 0) and times.late() == []


def test_a_failure_tells_nothing_of_speed() -> None:
    clock = Clock()
    times = FetchTimes(a_model(), 2048, clock)
    times.begin("a", 10, 0)
    clock.now += 50.0
    times.end("a", has_come=False)
    assert times.pays(1000, 0)
