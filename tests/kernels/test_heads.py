"""What is done to queries, keys and values within wider rows, and learned or gated values, against PyTorch's own."""

import pytest
import torch

from quire.kernels import ops
from quire.kernels.norm import clip, head_norm, scale_rows, set_alpha, xielu
from quire.platforms.cpu import CpuPlatform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251


@pytest.fixture(params=["reference", "native", "triton"], autouse=True)
def kernels(request, kept_selection):
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


def test_values_of_some_columns_are_clipped_and_scaled_by_position():
    row_TC = torch.randn(7, 90) * 3
    expected_TC = row_TC.clone()
    expected_TC[:, 5:80] = expected_TC[:, 5:80].clamp(-1.5, 1.5)
    clip(row_TC[:, 5:80], 1.5)
    assert torch.equal(row_TC, expected_TC)
    table_L, index_T = torch.randn(20), torch.tensor([3, 19, 0, 5, 5, 11, 2], dtype=torch.int32)
    expected_TC[:, 5:80] *= table_L[index_T.long()][:, None]
    scale_rows(row_TC[:, 5:80], table_L, index_T)
    torch.testing.assert_close(row_TC, expected_TC)


@pytest.mark.parametrize("gates", [1, 37])
def test_a_sigmoid_gate_scales_each_row_or_each_value(gates):
    x_TI, gate_TG = torch.randn(5, 37), torch.randn(5, 50)[:, 3 : 3 + gates]
    expected_TI = x_TI * gate_TG.sigmoid()
    ops.sigmoid_gate(x_TI, gate_TG)
    torch.testing.assert_close(x_TI, expected_TI)


def test_xielu_is_transformers_own():
    from transformers.activations import XIELUActivation

    oracle = XIELUActivation(dtype=torch.float32)
    oracle.alpha_p.data.fill_(0.7)
    oracle.alpha_n.data.fill_(-1.2)
    x_TI, alphas_2 = torch.linspace(-30, 30, 5 * 333).view(5, 333), torch.zeros(2)
    set_alpha(alphas_2, True, oracle.alpha_p.data)
    set_alpha(alphas_2, False, oracle.alpha_n.data)
    expected_TI = oracle._xielu_python(x_TI)
    xielu(x_TI, alphas_2)
    torch.testing.assert_close(x_TI, expected_TI, rtol=1e-5, atol=1e-5)
