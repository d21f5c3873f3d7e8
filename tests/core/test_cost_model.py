import random

import pytest

from quire.core.cost_model import MIN_OBSERVATIONS, CostModel


def shapes(count: int, seed: int = 1) -> list[tuple[int, int, float]]:
    generator = random.Random(seed)
    result = []
    for _ in range(count):
        sequences = generator.randrange(1, 64)
        tokens = sequences + generator.choice([0, generator.randrange(2000)])
        result.append((tokens, sequences, float(tokens * generator.randrange(10, 3000))))
    return result


def true_ms(tokens: int, sequences: int, attended: float) -> float:
    return 2.0 + 0.01 * tokens + 0.05 * sequences + 2e-6 * attended


def test_it_offers_nothing_before_it_has_seen_enough() -> None:
    model = CostModel()
    assert not model.is_ready and model.predict(10, 1, 100) == 0.0
    assert model.tokens_within(5.0, 0, 0, 0.0, 0) > 1 << 20
    assert model.predict_queue_delay(5, 500, max_num_seqs=8, max_num_batched_tokens=64) == 0.0


def test_it_converges_to_the_device() -> None:
    model = CostModel()
    for shape in shapes(400):
        model.observe(*shape, true_ms(*shape))
    for shape in shapes(50, seed=2):
        assert model.predict(*shape) == pytest.approx(true_ms(*shape), rel=0.05)


def test_outliers_hardly_move_it() -> None:
    model, generator = CostModel(), random.Random(3)
    for shape in shapes(1500):
        slow = 40.0 if generator.random() < 0.02 else 1.0
        model.observe(*shape, true_ms(*shape) * generator.uniform(0.97, 1.03) * slow)
    errors = [abs(model.predict(*shape) / true_ms(*shape) - 1) for shape in shapes(50, seed=4)]
    assert sorted(errors)[25] < 0.15


def test_it_follows_a_device_that_changes() -> None:
    model = CostModel()
    for shape in shapes(600):
        model.observe(*shape, true_ms(*shape))
    for shape in shapes(3000, seed=5):
        model.observe(*shape, 3 * true_ms(*shape))
    for shape in shapes(20, seed=6):
        assert model.predict(*shape) == pytest.approx(3 * true_ms(*shape), rel=0.2)


def test_coefficients_are_never_negative() -> None:
    model, generator = CostModel(), random.Random(7)
    for shape in shapes(300):
        model.observe(*shape, generator.uniform(0.1, 10.0))
        assert min(model.coefficients) >= 0.0


@pytest.mark.parametrize("nonsense", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_mean_nothing_are_passed_over(nonsense: float) -> None:
    model = CostModel()
    model.observe(10, 1, 100, nonsense)
    assert model.num_observations == 0


def test_the_chunk_that_it_sizes_takes_the_time_that_was_asked_for() -> None:
    model = CostModel()
    for shape in shapes(400):
        model.observe(*shape, true_ms(*shape))
    for context in (0, 1000, 50_000):
        chunk = model.tokens_within(10.0, 8, 8, 8000.0, context)
        attended = 8000.0 + chunk * (context + chunk / 2)
        assert true_ms(8 + chunk, 9, attended) == pytest.approx(10.0, rel=0.08)
    assert model.tokens_within(1.0, 8, 8, 8000.0, 0) == 0


def test_a_longer_queue_takes_longer() -> None:
    model = CostModel()
    for shape in shapes(MIN_OBSERVATIONS * 4):
        model.observe(*shape, true_ms(*shape))
    model.observe_output_length(100)
    delays = [
        model.predict_queue_delay(count, 500 * count, max_num_seqs=32, max_num_batched_tokens=2048)
        for count in (0, 10, 100, 1000)
    ]
    assert delays[0] == 0.0 and delays == sorted(delays) and delays[3] > 5 * delays[2] > 0
