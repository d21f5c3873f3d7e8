"""Norms of heads within wider rows, against PyTorch's own norms."""

import pytest
import torch

from quire.kernels import ops
from quire.kernels.head_norm import head_norm
from quire.platforms.cpu import CpuPlatform


@pytest.fixture(params=["reference", "native"], autouse=True)
def kernels(request, monkeypatch):
    monkeypatch.setattr(ops, "_chosen", dict(ops._chosen))
    monkeypatch.setattr(ops, "_choices", dict(ops._choices))
    if request.param == "reference":
        ops.select("any")
    else:
        CpuPlatform().select_kernels()
        if ops.choices()["head_norm"].chosen.platform != "cpu":
            pytest.skip("the native kernels are not built here")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(1, 60), (3, 20), (5, 7), (2, 64)])
def test_each_group_of_columns_is_normed_with_its_own_weight_and_the_rest_stays(groups, size, subtract_mean, has_bias):
    row_TC = torch.randn(9, groups * size + 11) * 3 + 0.5
    weight_GH, bias_GH = torch.randn(groups, size), torch.randn(groups, size) if has_bias else None
    x_TGH = row_TC[:, 4 : 4 + groups * size]
    grouped = x_TGH.reshape(9, groups, size)
    norm = torch.nn.functional.layer_norm if subtract_mean else torch.nn.functional.rms_norm
    expected = norm(grouped, (size,), eps=1e-3) * weight_GH + (0 if bias_GH is None else bias_GH)
    rest = row_TC[:, :4].clone(), row_TC[:, 4 + groups * size :].clone()
    head_norm(x_TGH, weight_GH, bias_GH, 1e-3, subtract_mean)
    torch.testing.assert_close(x_TGH, expected.reshape(9, -1), rtol=1e-5, atol=1e-5)
    assert torch.equal(row_TC[:, :4], rest[0])
    assert torch.equal(row_TC[:, 4 + groups * size :], rest[1])
