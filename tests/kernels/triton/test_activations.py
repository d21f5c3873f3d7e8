"""Triton activations, sums, soft caps and gathers against their references."""

import pytest
import torch
from tests.oracles.operations import norm as reference

from quire.kernels.triton.norm import activations, gather

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
SHAPES = [(1, 1), (3, 70), (2, 513), (5, 2049)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", activations.KINDS)
def test_activations_equal_the_reference(shape, kind):
    rows, width = shape
    x_T2I = torch.randn(rows, 2 * width, device=DEVICE) * 10
    actual_T2I, expected_T2I = x_T2I.clone(), x_T2I.clone()
    activations.activation(actual_T2I, kind)
    reference.activation(expected_T2I, kind)
    torch.testing.assert_close(actual_T2I, expected_T2I, atol=1e-5, rtol=1e-5)
    if kind != "relu2":
        outs = [torch.full((rows, width), float("nan"), device=DEVICE) for _ in range(2)]
        activations.gated_activation(x_T2I, kind, outs[0])
        reference.gated_activation(x_T2I, kind, outs[1])
        torch.testing.assert_close(*outs, atol=5e-5, rtol=1e-5)


def test_activations_of_extreme_values_are_finite():
    extremes = torch.tensor([[-1e30, -1e4, -100.0, -0.0, 0.0, 1e-30, 100.0, 1e4, 1e18]], device=DEVICE)
    for kind in (kind for kind in activations.KINDS if kind != "relu2"):
        actual, expected = extremes.clone(), extremes.clone()
        activations.activation(actual, kind)
        reference.activation(expected, kind)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(ValueError, match="activation 'swish' is unknown"):
        activations.activation(torch.randn(2, 16, device=DEVICE), "swish")


def test_what_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="x must be contiguous"):
        activations.activation(torch.randn(16, 2, device=DEVICE).T, "relu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("scale", "cap"), [(1.0, 0.0), (0.3, 0.0), (1.0, 30.0), (0.01, 5.0)])
def test_add_and_soft_caps_equal_the_reference(shape, scale, cap):
    x_TD = torch.randn(shape, device=DEVICE) * 50
    actual_TD, expected_TD = torch.ones_like(x_TD), torch.ones_like(x_TD)
    activations.add(x_TD, actual_TD, scale)
    reference.add(x_TD, expected_TD, scale)
    torch.testing.assert_close(actual_TD, expected_TD, atol=1e-5, rtol=1e-5)
    activations.scale_and_cap(actual_TD, scale, cap)
    reference.scale_and_cap(expected_TD, scale, cap)
    torch.testing.assert_close(actual_TD, expected_TD, atol=1e-7, rtol=2e-6)


@pytest.mark.parametrize("width", [1, 70, 1025])
def test_gathered_rows_are_the_rows(width):
    x_TD = torch.randn(7, width + 3, device=DEVICE)[:, 3:]
    index_S = torch.tensor([6, 0, 0, 3, 5, 1, 2, 2], dtype=torch.int32, device=DEVICE)
    out_SD = torch.full((8, width), float("nan"), device=DEVICE)
    gather.gather_rows(x_TD, index_S, out_SD)
    assert torch.equal(out_SD, x_TD[index_S.long()])
