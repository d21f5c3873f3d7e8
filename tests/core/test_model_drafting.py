"""How many guesses a drafter is asked for: as many as pay with the time that it takes, none where none do."""

import numpy as np
import pytest
from tests.oracles.hash_model import HashModel
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.config.speculative import SpeculativeConfig
from quire.core.draft_times import DraftCosts
from quire.core.model_drafting import FOLLOW, NOTHING, GivenProposer, ModelDrafting

KEYS = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}


def drafting_of(draft_ms: float, chance: float, num_requests: int = 1) -> tuple[ModelDrafting, np.ndarray]:
    """Rows that decode, steps of which take 10 ms and 0.1 ms a token, and a drafter that takes so long for a guess."""
    harness = SchedulerHarness(model=HashModel(), max_model_len=100)
    scheduler = harness.scheduler
    scheduler.speculate(SpeculativeConfig(**KEYS))
    drafting = scheduler.drafting
    assert isinstance(drafting, ModelDrafting)
    for tokens in range(1, 41):
        scheduler.cost_model.observe(tokens, 1 + tokens % 3, 37.0 * (7 * tokens % 11), 10.0 + 0.1 * tokens)
    for number in range(num_requests):
        harness.add(f"r{number}", [1, 2, 3, 4 + number], seed=number, max_tokens=50)
    scheduler.schedule()
    rows = drafting._batch.order()
    drafting._chance = chance
    for row in rows.tolist():
        drafting._row(row).chance = chance
    drafting._costs, drafting._rest = DraftCosts(), (0, 0)
    drafting._costs.observe(num_requests, 1, draft_ms)
    return drafting, rows


@pytest.mark.parametrize(
    ("draft_ms", "chance", "least", "most"),
    [
        (0.1, 0.95, 4, 4),
        (0.1, 0.3, 1, 3),
        (4.0, 0.95, 2, 4),
        (30.0, 0.95, NOTHING, NOTHING),
        (0.5, 0.01, NOTHING, NOTHING),
    ],
)
def test_as_many_guesses_are_asked_for_as_pay(draft_ms: float, chance: float, least: int, most: int) -> None:
    drafting, rows = drafting_of(draft_ms, chance)
    assert least <= drafting._decide(rows) <= most


def test_a_drafter_follows_where_guesses_of_other_rows_would_pay() -> None:
    drafting, rows = drafting_of(0.1, 0.9)
    drafting._row(int(rows[0])).chance = 0.01
    assert drafting._decide(rows) == FOLLOW


def test_a_drafter_rests_where_no_guesses_pay_unless_rows_come_or_go() -> None:
    drafting, rows = drafting_of(30.0, 0.9, num_requests=2)
    assert drafting._decide(rows) == NOTHING
    assert drafting._rests(rows) and not drafting._rests(rows[:1])


def test_costs_of_unknown_sizes_are_those_of_the_next_smaller_one() -> None:
    costs = DraftCosts()
    assert costs.predict(8) == 0.0
    costs.observe(2, 4, 2.0)
    assert costs.predict(1) == 0.0 and costs.predict(2) == costs.predict(64) == 0.5
    costs.observe(2, 4, 400.0)  # the machine was busy
    assert costs.predict(2) < 1.0


def test_a_guess_is_void_once_other_tokens_have_come() -> None:
    proposer = GivenProposer(10)
    proposer.give(12, [5, 6, 7])
    assert proposer.propose(4) == []
    proposer.extend([1, 2])
    assert proposer.propose(2) == [5, 6]
    proposer.extend([5])
    assert proposer.propose(4) == []
