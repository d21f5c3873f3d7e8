"""Triton's norms of heads, clipped and scaled values and xIELU against their references."""

import pytest
import torch
from tests.oracles.operations import norm as reference

from quire.kernels.triton.norm import heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def compare(name: str, dtype: torch.dtype, columns: slice, *arguments) -> None:
    """Both implementations on some columns of equal rows; the other columns stay."""
    ours_TC = (torch.randn(5, 1300) * 2 + 0.5).to(DEVICE, dtype)
    expected_TC = ours_TC.clone()
    getattr(heads, name)(ours_TC[:, columns], *arguments)
    getattr(reference, name)(expected_TC[:, columns], *arguments)
    torch.testing.assert_close(ours_TC, expected_TC, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(1, 1100), (3, 20), (5, 7), (2, 64)])
def test_norms_of_heads_equal_the_reference(groups, size, subtract_mean, dtype):
    weight_GH, bias_GH = torch.randn(2, groups, size, device=DEVICE)
    for bias in (None, bias_GH):
        compare("head_norm", dtype, slice(9, 9 + groups * size), weight_GH, bias, 1e-3, subtract_mean)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [slice(0, 1300), slice(3, 1190), slice(7, 30)])
def test_values_equal_the_reference(columns, dtype):
    compare("clip", dtype, columns, 0.8)
    index_T = torch.tensor([3, 0, 19, 7, 7], dtype=torch.int32, device=DEVICE)
    compare("scale_rows", dtype, columns, torch.randn(20, device=DEVICE), index_T)
    compare("xielu", dtype, columns, torch.tensor([0.7, 1.3], device=DEVICE))


def test_no_rows_are_no_work():
    empty_TC = torch.empty(0, 8, device=DEVICE)
    heads.clip(empty_TC, 1.0)
    heads.head_norm(empty_TC, torch.ones(2, 4, device=DEVICE), None, 1e-6, False)
