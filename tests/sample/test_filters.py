"""Thresholds and top values against full sorts, on vocabularies large enough for every path."""

import numpy as np
import pytest
import torch
from tests.oracles import sampler_reference as oracle
from tests.sample.helpers import random_logits

from quire.kernels.cpu.sampling import FilterRows, compute_thresholds, hide_below, top_values
from quire.sampling_params import SamplingParams


@pytest.mark.parametrize("vocab", [5, 64, 1000, 32000, 50257])
@pytest.mark.parametrize("count", [1, 3, 50, 128, 4000])
def test_top_values_equal_a_full_sort(vocab: int, count: int) -> None:
    logits = random_logits(3, vocab, seed=vocab + count)
    logits[1] = logits[1].round()  # many ties
    logits[2, 3:] = -torch.inf
    expected = torch.sort(logits, dim=-1, descending=True).values[:, :count]
    assert torch.equal(top_values(logits, count), expected)


def filters_of(*params: SamplingParams) -> FilterRows:
    return FilterRows(
        np.array([1 / item.temperature for item in params], dtype=np.float32),
        np.array([item.top_k for item in params], dtype=np.int32),
        np.array([item.top_p for item in params], dtype=np.float32),
        np.array([item.min_p for item in params], dtype=np.float32),
    )


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
    thresholds = compute_thresholds(logits, filters_of(*CASES), torch.empty_like(logits))
    for row, params in enumerate(CASES):
        expected = oracle.probabilities(logits[row].numpy(), params, [], []) > 0
        kept = (logits[row] >= thresholds[row]).numpy()
        # At scale 0.3 a nucleus holds thousands of nearly equal tokens: rounding may move its edge by one of them.
        assert np.abs(kept.sum() - expected.sum()) <= (1 if params.top_p < 1 else 0)
        assert (kept != expected).sum() <= 1


def test_a_row_has_the_same_threshold_in_any_batch() -> None:
    logits = random_logits(len(CASES), 32000, seed=1, scale=1.0)
    together = compute_thresholds(logits, filters_of(*CASES), torch.empty_like(logits))
    for row, params in enumerate(CASES):
        alone = logits[row : row + 1]
        assert compute_thresholds(alone, filters_of(params), torch.empty_like(alone))[0] == together[row]


def test_equal_logits_at_the_cut_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]])
    thresholds = compute_thresholds(logits, filters_of(SamplingParams(top_k=2)), torch.empty_like(logits))
    hide_below(logits, thresholds)
    assert torch.isfinite(logits[0]).tolist() == [False, True, True, True, True, False]
