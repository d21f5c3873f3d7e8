"""The simulator runs the engine's own scheduler: no request is lost, and its plans are those of a real core."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.builders import make_config
from tests.oracles.hash_model import HashExecutor

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind, group_layers
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.simulator.capacity import (
    NotingScheduler,
    Slo,
    Turn,
    calibration_loads,
    fit_costs,
    measure_turns,
    noting,
    parse_slo,
    search,
)
from quire.simulator.replay import Figures, RealEngine, Replay, VirtualEngine
from quire.simulator.step_costs import DEVICES, EstimatedCosts, FittedCosts, read_costs
from quire.simulator.traffic import Arrival, poisson, read_trace

COSTS = FittedCosts(base=1.0, token=0.01, sequence=0.1, pair=1e-5)


def pages_of(count: int) -> KVCacheConfig:
    return KVCacheConfig(count, group_layers([KVCacheSpec(KVKind.FULL, 4, 16)]))


def virtual(config: EngineConfig, num_pages: int = 256) -> VirtualEngine:
    return VirtualEngine(config, pages_of(num_pages), COSTS)


def arrival_lists(most: int = 20) -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(
        Arrival,
        st.floats(0, 2, allow_nan=False),
        st.integers(1, 60),
        st.integers(1, 20),
        st.lists(st.integers(0, 2), max_size=2).map(tuple),
        st.just(8),
    )
    return st.lists(one, max_size=most).map(lambda found: sorted(found, key=lambda each: each.seconds))


@settings(max_examples=60, deadline=None)
@given(arrival_lists(), st.integers(1, 3), st.booleans(), st.integers(40, 200), st.integers(1, 8))
def test_every_request_ends_once_with_times_in_order(
    arrivals: list[Arrival], copies: int, ahead: bool, num_pages: int, rows: int
) -> None:
    config = make_config(max_model_len=100, max_num_seqs=rows, max_num_batched_tokens=32, async_scheduling=ahead)
    engines = [virtual(config, num_pages) for _ in range(copies)]
    replay = Replay(engines)
    figures = replay.run(arrivals)
    assert figures.num_requests == len(arrivals) == len(figures.end_to_end) == len(figures.first_token)
    assert figures.num_output_tokens == sum(each.output_tokens for each in arrivals)
    assert all(0 < first <= end for first, end in zip(figures.first_token, figures.end_to_end, strict=True))
    assert all(load.cost == 0 for load in replay._chooser.loads)
    for engine in engines:
        assert not engine.scheduler.has_work() and engine.scheduler.stats().num_free_blocks == num_pages - 1
    if arrivals:
        # A device computes one step at a time: no faster than all tokens at the token's cost, spread over the copies.
        least_ms = COSTS.token * (figures.num_output_tokens - len(arrivals)) / copies
        assert figures.duration * 1e3 >= least_ms


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_pages", [60, 400])
def test_a_simulation_plans_the_steps_that_a_real_core_with_a_hash_model_plans(ahead: bool, num_pages: int) -> None:
    load = [Arrival(0.0, 3 + 7 * number % 50, 1 + number % 17, (number % 3,), 8) for number in range(30)]
    config = make_config(
        max_model_len=100, max_num_seqs=6, max_num_batched_tokens=24, num_blocks=num_pages, async_scheduling=ahead
    )
    noted, made = noting(config)
    core = EngineCore(noted, HashExecutor(noted))
    Replay([RealEngine(core)]).run(load)
    core.shutdown()
    simulated = virtual(config, core.kv_cache.num_blocks)
    scheduler = NotingScheduler(
        config.scheduler,
        config.cache,
        core.kv_cache,
        max_model_len=100,
        hash_key=b"k" * 32,
        clock=lambda: simulated.now,
    )
    simulated.scheduler = scheduler
    Replay([simulated]).run(load)
    assert scheduler.plans == made[0].plans and len(scheduler.plans) > 30


def test_a_request_alone_takes_the_sum_of_its_steps() -> None:
    config = make_config(max_model_len=100, max_num_batched_tokens=16)
    figures = Replay([virtual(config)]).run([Arrival(0.5, 40, 3)])
    prefill = sum(COSTS.step_ms(count, 1, count * end) for count, end in ((16, 16), (16, 32), (8, 40)))
    decode = [COSTS.step_ms(1, 1, end) for end in (41, 42)]
    assert figures.first_token[0] == pytest.approx(prefill / 1e3)
    assert figures.per_token[0] == pytest.approx(sum(decode) / 2e3)
    assert figures.duration == pytest.approx(0.5 + (prefill + sum(decode)) / 1e3)


def test_more_copies_answer_sooner_and_prefixes_are_found_where_they_were_computed() -> None:
    config = make_config(max_model_len=256, max_num_seqs=4, num_blocks=400)
    load = [Arrival(0.001 * number, 140, 8, (number * number % 5,), 128) for number in range(60)]

    def run(copies: int, by_prefix: bool) -> Figures:
        return Replay([virtual(config, 160) for _ in range(copies)], by_prefix=by_prefix).run(load)

    one, four, in_turn = run(1, True), run(4, True), run(4, False)
    assert four.percentile("first_token", 99) < one.percentile("first_token", 99)
    assert four.num_cached_tokens > in_turn.num_cached_tokens


def test_costs_are_fitted_from_turns_of_a_real_loop() -> None:
    config = make_config(max_model_len=128, num_blocks=2000)
    noted, made = noting(config)
    core = EngineCore(noted, HashExecutor(noted))
    turns = measure_turns(core, made[0], repeats=1)
    core.shutdown()
    costs = fit_costs(turns)
    assert (
        min(costs.base, costs.token, costs.sequence, costs.pair) >= 0
        and costs.step_ms(64, 64, 64 * 60) > costs.step_ms(1, 1, 10) > 0
    )
    shapes = {shape[:2] for shape in made[0].shapes}
    assert len(shapes) > 8 and max(map(len, calibration_loads(128, 64))) == 48


def test_costs_bend_where_turns_do_and_scatter_as_they_did() -> None:
    """Turns of few tokens take twice what the line through the others says, and each third turn half as long again."""
    turns: list[Turn] = []
    for number in range(900):
        tokens, late = 1 + number * 37 % 250, 1.5 if number % 3 == 2 else 1.0
        shape = (tokens, 1, 100.0 * tokens)
        turn_ms = late * (2.0 if tokens < 8 else 1.0) * (1.0 + 0.1 * tokens)
        turns.append((shape, turn_ms, 0.25 * turn_ms))
    costs = fit_costs(turns)
    assert costs.told[1:] == pytest.approx([0.25] * 8)
    for factors in costs.scatter[1:]:
        assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.01) and max(factors) > 1.2 * min(factors)
    for tokens in (2, 5, 20, 100, 240):
        together = 7 / 6 * (2.0 if tokens < 8 else 1.0) * (1.0 + 0.1 * tokens)
        assert costs.step_ms(tokens, 1, 100.0 * tokens) == pytest.approx(together, rel=0.15)


def test_steps_take_what_is_predicted_times_the_scatter_of_the_turns_in_their_order() -> None:
    costs = FittedCosts(2.0, 0.0, 0.0, 0.0, bends=(1.0, 1.0, 3.0), scatter=((1.0,), (1.0, 0.5), (2.0,)))
    engine = VirtualEngine(make_config(max_model_len=100), pages_of(64), costs)
    figures = Replay([engine]).run([Arrival(0.0, 40, 4)])  # a prompt, three tokens
    assert figures.first_token[0] == pytest.approx(12e-3)
    assert figures.duration == pytest.approx((12 + 2 + 1 + 2) * 1e-3)


def test_the_search_finds_the_smallest_number_and_a_list_is_tried_as_it_is() -> None:
    tried: list[int] = []

    def run(count: int) -> Figures:
        tried.append(count)
        figures = Figures()
        figures.first_token.append(10 / count)
        return figures

    slo = parse_slo("ttft=770ms")
    trials = search(run, slo, {}, (), 256)
    assert min(trial.num_devices for trial in trials if trial.meets) == 13 and len(tried) <= 8
    assert [trial.num_devices for trial in search(run, slo, {}, (3, 20), 256)] == [3, 20]
    assert not any(trial.meets for trial in search(run, slo, {}, (), 8))


def test_limits_are_read_with_their_units_and_a_refused_request_breaks_them() -> None:
    slo = parse_slo("ttft=500ms,tpot=0.05,e2el=10s", 90.0)
    assert slo == Slo({"ttft": 0.5, "tpot": 0.05, "e2el": 10.0}, 90.0)
    assert slo.is_met(Figures()) and not slo.is_met(Figures(num_refused=1))
    for wrong in ("tfft=1", "ttft=soon", "ttft=0", "ttft"):
        with pytest.raises(ConfigError):
            parse_slo(wrong)


def test_traces_are_read_in_order_of_time_and_wrong_lines_are_named(tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 600, "output_length": 9, "hash_ids": [1, 3]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(str(trace), speed=2.0)
    assert (first.seconds, second.seconds) == (0.5, 1.0)
    one, two = first.prompt(0), second.prompt(1)
    assert (len(one), len(two)) == (600, 700) and one[:512] == two[:512] and one[512:] != two[512:600]
    trace.write_text(json.dumps(lines[0]) + '\n{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(str(trace))


def test_poisson_traffic_has_its_rate_and_is_the_same_each_time() -> None:
    arrivals = list(poisson(50.0, 2000, 100, 10, seed=3))
    assert arrivals == list(poisson(50.0, 2000, 100, 10, seed=3))
    assert 2000 / arrivals[-1].seconds == pytest.approx(50.0, rel=0.1)
    assert np.mean([each.prompt_tokens for each in arrivals]) == pytest.approx(100, rel=0.05)


def test_the_estimate_for_an_h200_has_the_times_that_were_measured_on_one() -> None:
    costs = EstimatedCosts(DEVICES["h200"], 15.0e9, 7.5e9, 131072, 4 * 4096 * 32)
    assert costs.step_ms(1, 1, 256) == pytest.approx(3.98, rel=0.06)
    assert costs.step_ms(32, 32, 32 * 256) == pytest.approx(4.87, rel=0.06)
    assert costs.step_ms(8192, 1, 8192 * 4096) > 100


def test_costs_of_a_file_are_checked(tmp_path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS.describe()))
    assert read_costs(str(path)) == COSTS
    for wrong in ("{}", '{"base": -1, "token": 1, "sequence": 1, "pair": 1}', "nothing"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="costs"):
            read_costs(str(path))
