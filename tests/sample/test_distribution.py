"""Drawn tokens follow the exact distribution: chi-square over many seeds and over many positions."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.oracles import sampler_reference as oracle
from tests.sample.helpers import add, draw, make_sampler, random_logits

from quire.sampling_params import SamplingParams

VOCAB = 40
DRAWS = 20_000
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "low temperature": {"temperature": 0.6},
    "high temperature": {"temperature": 1.8},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all filters": {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties and bias": {
        "temperature": 1.0,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "logit_bias": {3: 2.0},
    },
}


def chi_square_p_value(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Of the counts against the distribution; tokens that are expected less than five times are counted together."""
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_tokens_follow_the_exact_distribution(name: str, varied: str) -> None:
    params = CASES[name]
    logits = random_logits(1, VOCAB, seed=3, scale=1.5)
    probabilities = oracle.probabilities(logits[0].numpy(), SamplingParams(**params), [5, 6, 3], [])
    rows = 2000
    sampler = make_sampler(vocab=VOCAB, rows=rows)
    index = np.arange(rows, dtype=np.int32)
    tokens = []
    for batch in range(DRAWS // rows):
        for row in range(rows):
            seed = 1_000_003 * (batch * rows + row) if varied == "seed" else 12345
            add(sampler, row, prompt=[5, 6, 3], seed=seed, **params)
        positions = np.full(rows, 3, dtype=np.int32) if varied == "seed" else 3 + batch * rows + index
        tokens.append(draw(sampler, logits.expand(rows, VOCAB), index, positions).token_ids)
    # Seeds are fixed, so this either always passes or never; a correct sampler fails one in a thousand such choices.
    assert chi_square_p_value(np.concatenate(tokens), probabilities) > 1e-3


def test_the_chi_square_test_would_notice_a_wrong_temperature() -> None:
    logits = random_logits(1, VOCAB, seed=3, scale=1.5)
    sampler = make_sampler(vocab=VOCAB, rows=4000)
    index = np.arange(4000, dtype=np.int32)
    for row in range(4000):
        add(sampler, row, seed=row, temperature=1.0)
    tokens = draw(sampler, logits.expand(4000, VOCAB), index, index).token_ids
    wrong = oracle.probabilities(logits[0].numpy(), SamplingParams(temperature=1.15), [], [])
    assert chi_square_p_value(tokens, wrong) < 1e-3


def test_consecutive_seeds_are_independent() -> None:
    sampler = make_sampler(vocab=4, rows=4000)
    index = np.arange(4000, dtype=np.int32)
    for row in range(4000):
        add(sampler, row, seed=row)
    tokens = draw(sampler, torch.zeros(4000, 4), index, np.full(4000, 9)).token_ids
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-3
