"""Unpacking a step's packet: the Triton kernel against the reference, and both against what was packed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.oracles.operations import step as reference

from quire.conformance.cases.packets import MAX_ROWS, MAX_TOKENS, make_packet, poisoned
from quire.kernels.step import HEADER
from quire.kernels.triton import step as kernels


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 300), st.integers(0, MAX_ROWS), st.integers(1, 3), st.data())
def test_the_kernel_unpacks_as_the_reference_does(seed, tokens, requests, groups, data):
    rng = np.random.default_rng(seed)
    samples = data.draw(st.integers(0, requests))
    updates = data.draw(st.integers(0, 150))
    packet = make_packet(rng, tokens, requests, samples, updates, groups)
    bounds = data.draw(st.integers(max(tokens, 1), MAX_TOKENS)), data.draw(st.integers(max(requests, 1), MAX_ROWS))
    ours, expected = poisoned(packet, groups), poisoned(packet, groups)
    kernels.unpack_step(ours, *bounds)
    reference.unpack_step(expected, *bounds)
    for mine, theirs in ((ours, expected), (ours.columns, expected.columns)):
        for name, tensor in vars(theirs).items():
            if isinstance(tensor, torch.Tensor):
                torch.testing.assert_close(getattr(mine, name), tensor, rtol=0, atol=0, equal_nan=True, msg=name)


def test_unknown_tokens_come_from_their_rows_and_padding_is_harmless():
    rng = np.random.default_rng(1)
    packet = make_packet(rng, 3, 2, 2, 0, 1)
    start = HEADER + 3 * 2 + 9 * 2
    packet[start : start + 3] = (5, -1, -4)
    buffers = poisoned(packet, 1)
    kernels.unpack_step(buffers, 6, 4)
    assert buffers.input_ids_T[:6].tolist() == [5, 1000, 1003, 0, 0, 0]
    assert buffers.slots_GT[0, 3:6].tolist() == [-1, -1, -1]
    assert buffers.seq_lens_B[2:4].tolist() == [0, 0]
    assert buffers.query_start_B[3:5].tolist() == [3, 3]
    assert buffers.columns.rows_S[2:4].tolist() == [MAX_ROWS, MAX_ROWS]
    assert torch.isinf(buffers.columns.inverse_temperature_S[2:4]).all()


@pytest.mark.parametrize("module", [kernels, reference])
def test_tokens_are_kept_by_row(module):
    last = torch.zeros(6, dtype=torch.int32)
    module.keep_tokens(torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor([4, 0, 5], dtype=torch.int32), last)
    assert last.tolist() == [8, 0, 0, 0, 7, 9]
