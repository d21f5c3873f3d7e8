"""The native CPU library's draws against their definition, to the bit, and masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.test_cpu_kernels import drawn, native, reference, restore_threads  # noqa: F401 (a fixture)

from quire.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.library_status()[0], reason=f"no library: {cpu.library_status()[2]}")


@drawn
@given(
    rows=st.integers(1, 9),
    v=st.one_of(st.integers(1, 70), st.sampled_from([4095, 4096, 4097, 32001])),
    levels=st.sampled_from([2, 1000]),
    threads=st.integers(1, 4),
)
def test_argmax_is_the_first_of_the_largest(rows, v, levels, threads):
    cpu.set_num_threads(threads)
    logits_SV = torch.randint(0, levels, (rows, v)).float()
    logits_SV[torch.rand(rows, v) < 0.2] = float("-inf")
    out_S = torch.empty(rows, dtype=torch.int32)
    native("argmax")(logits_SV, out_S)
    assert out_S.tolist() == [row.index(max(row)) for row in logits_SV.tolist()]


@drawn
@given(
    rows=st.integers(1, 9),
    v=st.one_of(st.integers(1, 70), st.sampled_from([4095, 4096, 4097])),
    masks=st.integers(1, 5),
    threads=st.integers(1, 4),
)
def test_masks_hide_what_they_do_not_allow(rows, v, masks, threads):
    cpu.set_num_threads(threads)
    allowed_XW = torch.randint(-(2**31), 2**31, (masks, -(-v // 32)), dtype=torch.int32)
    allowed_XW[torch.rand(allowed_XW.shape) < 0.3] = -1
    slots_S = torch.randint(-1, masks, (rows,), dtype=torch.int32)
    logits_SV = torch.randn(rows, v)
    began_SV, expected_SV = logits_SV.clone(), logits_SV.clone()
    reference("keep_allowed")(expected_SV, slots_S, allowed_XW)
    native("keep_allowed")(logits_SV, slots_S, allowed_XW)
    assert torch.equal(logits_SV, expected_SV)
    columns = torch.rand(rows) + 0.5, torch.arange(rows), torch.arange(rows) + masks
    outs = [torch.empty(rows, dtype=torch.int32) for _ in range(2)]
    reference("gumbel_argmax")(expected_SV, *columns, outs[0])
    native("allowed_gumbel_argmax")(began_SV, slots_S, allowed_XW, *columns, outs[1])
    assert torch.equal(*outs)


@drawn
@given(
    rows=st.integers(1, 5),
    v=st.one_of(st.integers(1, 70), st.sampled_from([4097, 9001])),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**63 - 1),
    threads=st.integers(1, 4),
)
def test_gumbel_argmax_draws_the_reference_tokens_to_the_bit(rows, v, seed, position, threads):
    cpu.set_num_threads(threads)
    # Equal logits leave the choice to the noise's last bit.
    logits_SV = torch.randint(0, 2, (rows, v)).float()
    inverse_S = torch.tensor([0.0, 1.0, float("inf"), 0.37, 3.1][:rows])
    seed_S, position_S = torch.full((rows,), seed), torch.full((rows,), position)
    outs = [torch.empty(rows, dtype=torch.int32) for _ in range(2)]
    native("gumbel_argmax")(logits_SV, inverse_S, seed_S, position_S, outs[0])
    reference("gumbel_argmax")(logits_SV, inverse_S, seed_S, position_S, outs[1])
    assert torch.equal(*outs)


def test_philox_gives_the_published_words():
    # Known answers of the Random123 distribution: key 0 and counter 0; the all-ones key and position.
    from quire.kernels.sampling import philox

    zero = torch.zeros(1, dtype=torch.int64)
    assert philox(zero, zero, 4)[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_gumbel_argmax_draws_from_the_softmax():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = 40_000
    out_S = torch.empty(draws, dtype=torch.int32)
    native("gumbel_argmax")(
        (probabilities.log() * 0.7).expand(draws, 4).contiguous(),
        torch.full((draws,), 1 / 0.7),
        torch.full((draws,), 2**40 + 12345),
        torch.arange(draws),
        out_S,
    )
    expected = probabilities * draws
    chi_square = ((torch.bincount(out_S, minlength=4) - expected) ** 2 / expected).sum()
    assert chi_square < 16.3, "p < 0.001 with three degrees of freedom"


# --- rope and attention --------------------------------------------------------------------------------------------
