"""Prompts, lengths and percentiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.benchmarks import common


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
