"""Triton norms against their references, and their rows against themselves in other batches."""

import pytest
import torch
from tests.oracles.operations import norm as reference

from quire.kernels.triton.norm import norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 64), (5, 130), (2, 1000), (9, 257)])
def test_norms_equal_the_reference(rows, width, has_residual, dtype):
    x_TD = (torch.randn(rows, width) * 3 + 1).to(DEVICE, dtype)
    weight_D, bias_D = torch.randn(width, device=DEVICE), torch.randn(width, device=DEVICE)
    for name, extra in (("rms_norm", ()), ("layer_norm", (bias_D,)), ("layer_norm", (None,))):
        outs, residuals = [], []
        for module in (norms, reference):
            out_TD = torch.full_like(x_TD, float("nan"))
            residual_TD = torch.arange(rows * width, device=DEVICE).reshape(rows, width).to(dtype) / (rows * width)
            getattr(module, name)(x_TD, weight_D, *extra, 1e-3, out_TD, residual_TD if has_residual else None)
            outs.append(out_TD)
            residuals.append(residual_TD)
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(outs[0], outs[1], atol=bound, rtol=bound)
        torch.testing.assert_close(residuals[0], residuals[1], atol=0, rtol=0 if dtype is torch.float32 else 2**-7)


def test_a_norm_may_write_over_its_input():
    x_TD, weight_D = torch.randn(3, 65, device=DEVICE), torch.randn(65, device=DEVICE)
    expected_TD = torch.empty_like(x_TD)
    reference.rms_norm(x_TD, weight_D, 1e-6, expected_TD)
    norms.rms_norm(x_TD, weight_D, 1e-6, x_TD)
    torch.testing.assert_close(x_TD, expected_TD, atol=1e-5, rtol=1e-5)


def test_rows_may_lie_apart():
    wide_TD = torch.randn(4, 200, device=DEVICE)
    x_TD, weight_D = wide_TD[:, 50:150], torch.randn(100, device=DEVICE)
    out_TD, expected_TD = torch.zeros_like(wide_TD), torch.zeros_like(wide_TD)
    norms.rms_norm(x_TD, weight_D, 1e-6, out_TD[:, 20:120])
    reference.rms_norm(x_TD, weight_D, 1e-6, expected_TD[:, 20:120])
    torch.testing.assert_close(out_TD, expected_TD, atol=1e-5, rtol=1e-5)


def test_a_rows_bits_do_not_depend_on_the_batch():
    x_TD, weight_D = torch.randn(70, 300, device=DEVICE), torch.randn(300, device=DEVICE)
    whole_TD = torch.empty_like(x_TD)
    norms.rms_norm(x_TD, weight_D, 1e-6, whole_TD)
    for rows in (1, 2, 33):
        part_TD = torch.empty_like(x_TD[:rows])
        norms.rms_norm(x_TD[70 - rows :], weight_D, 1e-6, part_TD)
        assert torch.equal(part_TD, whole_TD[70 - rows :])


def test_no_rows_are_no_work():
    empty_TD = torch.empty(0, 8, device=DEVICE)
    norms.rms_norm(empty_TD, torch.ones(8, device=DEVICE), 1e-6, empty_TD)
