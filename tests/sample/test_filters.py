"""Thresholds against full sorts, on vocabularies large enough for every path."""

import numpy as np
import pytest
import torch
from tests.oracles import sampler_reference as oracle
from tests.sample.helpers import random_logits

from quire.kernels.cpu.sampling import filtered_gumbel_argmax
from quire.sampling_params import SamplingParams


def compute_thresholds(logits_SV: torch.Tensor, *params: SamplingParams) -> torch.Tensor:
    rows = len(params)
    threshold_S, out_S = torch.empty(rows), torch.empty(rows, dtype=torch.int32)
    zeros_S = torch.zeros(rows, dtype=torch.int64)
    filtered_gumbel_argmax(
        logits_SV,
        torch.tensor([1 / item.temperature for item in params]),
        torch.tensor([item.top_k for item in params], dtype=torch.int32),
        torch.tensor([item.top_p for item in params]),
        torch.tensor([item.min_p for item in params]),
        zeros_S,
        zeros_S,
        threshold_S,
        out_S,
    )
    drawn = logits_SV[torch.arange(rows), out_S.long()]
    assert (drawn >= threshold_S).all()
    return threshold_S


@pytest.mark.parametrize("vocab", [5, 64, 1000, 32000, 50257])
@pytest.mark.parametrize("count", [1, 3, 50, 128, 4000])
def test_the_threshold_of_top_k_is_the_value_of_that_place_in_a_full_sort(vocab: int, count: int) -> None:
    logits = random_logits(3, vocab, seed=vocab + count)
    logits[1] = logits[1].round()  # many ties
    logits[2, 3:] = -torch.inf
    ordered = torch.sort(logits, dim=-1, descending=True).values
    expected = ordered[:, count - 1] if count < vocab else torch.full((3,), -torch.inf)
    assert torch.equal(compute_thresholds(logits, *[SamplingParams(top_k=count)] * 3), expected)


CASES = [
    SamplingParams(top_k=50),
    SamplingParams(top_k=3000, top_p=0.99),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.9999),
    SamplingParams(top_p=0.9, temperature=1.9),
    SamplingParams(min_p=0.02),
    SamplingParams(min_p=0.02, top_p=0.8),
    SamplingParams(top_k=40, top_p=0.7, min_p=0.1),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.999, temperature=0.1),
]


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_each_row_of_a_mixed_batch_keeps_what_the_oracle_keeps(scale: float) -> None:
    vocab = 10007
    logits = random_logits(len(CASES), vocab, seed=8, scale=scale)
    thresholds = compute_thresholds(logits, *CASES)
    for row, params in enumerate(CASES):
        expected = oracle.probabilities(logits[row].numpy(), params, [], []) > 0
        kept = (logits[row] >= thresholds[row]).numpy()
        # At scale 0.3 a nucleus holds thousands of nearly equal tokens: rounding may move its edge by one of them.
        assert np.abs(kept.sum() - expected.sum()) <= (1 if params.top_p < 1 else 0)
        assert (kept != expected).sum() <= 1


def test_a_row_has_the_same_threshold_in_any_batch() -> None:
    logits = random_logits(len(CASES), 32000, seed=1, scale=1.0)
    together = compute_thresholds(logits, *CASES)
    for row, params in enumerate(CASES):
        alone = logits[row : row + 1]
        assert compute_thresholds(alone, params)[0] == together[row]


def test_equal_logits_at_the_cut_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]])
    threshold = compute_thresholds(logits, SamplingParams(top_k=2))
    assert (logits[0] >= threshold).tolist() == [False, True, True, True, True, False]
