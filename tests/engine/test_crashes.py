"""Cores die at random points, thousands of times: every request ends exactly once, with the oracle's tokens."""

import logging
from typing import Any

import pytest
from tests.oracles.crashing_engine import crash

FATES: dict[str, dict[str, Any]] = {
    "one step at a time": {},
    "two steps in flight": {"async_scheduling": True},
    "preempted too": {"async_scheduling": True, "num_blocks": 40, "policy": "priority"},
    "with requests that kill": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "poison_rate": 0.01},
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every death has its lines in the log."""
    monkeypatch.setattr(logging.getLogger("quire"), "level", logging.CRITICAL)


@pytest.mark.parametrize("fate", FATES)
def test_no_request_is_lost_however_often_cores_die(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = crash(1, 700, monkeypatch, **FATES[fate])
    assert tally.ended.total() == 700 and tally.ended["complete"] > 600
    assert tally.num_deaths > 5
    assert bool(tally.ended["given up"]) is ("poison_rate" in FATES[fate])


PIECES, IN_A_PIECE = 40, 25_000
"""A million; a piece takes 20 to 50 s of one core."""


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(PIECES))
def test_nor_of_a_million(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fate = list(FATES.values())[seed % len(FATES)]
    if "poison_rate" in fate:
        fate = fate | {"poison_rate": 0.001}  # each costs several cores
    tally = crash(100 + seed, IN_A_PIECE, monkeypatch, max_tokens=4, at_once=96, **fate)
    assert tally.ended.total() == IN_A_PIECE and tally.num_deaths > 100
