"""Triton's greedy and Gumbel-max choices against the definition, to the bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.oracles.operations import sampling as reference

from quire.kernels.triton.sampling import draw as sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
INFINITY = float("inf")
drawn = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
widths = st.one_of(st.integers(1, 70), st.sampled_from([1023, 1024, 1025, 4097]))


def empty(rows: int) -> torch.Tensor:
    return torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)


@drawn
@given(rows=st.integers(1, 5), v=widths, levels=st.sampled_from([2, 1000]), seed=st.integers(0, 2**31))
def test_argmax_is_the_first_of_the_largest(rows, v, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    logits_SV = torch.randint(0, levels, (rows, v), generator=generator).float()
    logits_SV[torch.rand(rows, v, generator=generator) < 0.2] = -INFINITY
    out_S = empty(rows)
    sampling.argmax(logits_SV.to(DEVICE), out_S)
    assert out_S.tolist() == [row.index(max(row)) for row in logits_SV.tolist()]


@drawn
@given(
    rows=st.integers(1, 5),
    v=widths,
    levels=st.sampled_from([1, 2, 9]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**63 - 1),
)
def test_gumbel_argmax_draws_the_reference_tokens_to_the_bit(rows, v, levels, seed, position):
    # Equal logits leave the choice to the noise's last bit.
    logits_SV = torch.randint(0, levels, (rows, v)).float()
    inverse_S = torch.tensor([0.0, 1.0, INFINITY, 0.37, 100.0][:rows])
    seed_S, position_S = torch.full((rows,), seed), torch.full((rows,), position)
    expected_S, out_S = empty(rows).cpu(), empty(rows)
    reference.gumbel_argmax(logits_SV, inverse_S, seed_S, position_S, expected_S)
    sampling.gumbel_argmax(*(x.to(DEVICE) for x in (logits_SV, inverse_S, seed_S, position_S)), out_S)
    assert out_S.tolist() == expected_S.tolist()


def test_positions_may_be_int32_and_rows_may_lie_apart():
    logits_SV = torch.randn(3, 1500, device=DEVICE)[:, 100:1300]
    inverse_S, seed_S = torch.tensor([1.0, 0.5, INFINITY], device=DEVICE), torch.arange(3, device=DEVICE)
    position_S = torch.tensor([5, 6, 7], device=DEVICE)
    expected_S, out_S = empty(3), empty(3)
    reference.gumbel_argmax(logits_SV, inverse_S, seed_S, position_S, expected_S)
    sampling.gumbel_argmax(logits_SV, inverse_S, seed_S, position_S.int(), out_S)
    assert torch.equal(out_S, expected_S)


@pytest.mark.parametrize("inverse", [1.0, INFINITY])
@pytest.mark.parametrize("value", [-INFINITY, float("nan"), INFINITY, 0.0])
def test_a_row_of_one_odd_value_gives_an_index_of_the_row(value, inverse):
    logits_SV = torch.full((1, 1100), value, device=DEVICE)
    out_S, zero_S = empty(1), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    sampling.gumbel_argmax(logits_SV, torch.tensor([inverse], device=DEVICE), zero_S, zero_S, out_S)
    assert 0 <= int(out_S) < 1100


def test_hidden_tokens_are_never_drawn():
    logits_SV = torch.full((1, 2048), -INFINITY, device=DEVICE)
    logits_SV[0, [3, 1500]] = torch.tensor([0.0, 0.5], device=DEVICE)
    seen = set()
    for seed in range(12):
        out_S, position_S = empty(1), torch.tensor([9], device=DEVICE)
        seed_S = torch.tensor([seed], device=DEVICE)
        sampling.gumbel_argmax(logits_SV, torch.ones(1, device=DEVICE), seed_S, position_S, out_S)
        seen.add(int(out_S))
    assert seen == {3, 1500}
