"""Packed and int8 products, against loops over single numbers."""

import pytest
import torch

from quire.kernels import ops, packed
from quire.kernels.packed import dequantize, pack_nibbles, unpack_nibbles
from quire.kernels.types import Int8Weight, PackedWeight

N, K, T = 5, 16, 3


@pytest.fixture(autouse=True)
def _kernels():
    ops.select("any")


def value_of(n: int, k: int, codes_NK, scale_NG, zero_NG=None, table=None) -> float:
    group = k // (K // scale_NG.shape[1])
    code = int(codes_NK[n, k])
    value = float(code if table is None else table[code])
    zero = 0.0 if zero_NG is None else float(zero_NG[n, group])
    return (value - zero) * float(scale_NG[n, group])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("form", ["int4 with zeros", "int4 with a table", "int8", "int8 with zeros"])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_a_packed_product_is_the_sum_of_inputs_times_scaled_codes(groups, form, is_permuted):
    generator = torch.Generator().manual_seed(groups)
    four = form.startswith("int4")
    codes_NK = torch.randint(0 if four else -128, 16 if four else 128, (N, K), generator=generator)
    scale_NG = torch.rand(N, groups, generator=generator) + 0.1
    zero_NG = torch.randn(N, groups, generator=generator) * 4 if "zeros" in form else None
    table = torch.randn(16, generator=generator) if "table" in form else None
    perm = torch.randperm(K, generator=generator).int() if is_permuted else None
    bias_N = torch.randn(N, generator=generator)
    x_TK = torch.randn(T, K, generator=generator)
    data = pack_nibbles(codes_NK) if four else codes_NK.to(torch.int8)
    weight = PackedWeight(N, K, torch.float32, data, bias=bias_N, scale=scale_NG, zero=zero_NG, table=table, perm=perm)
    expected_TN = torch.zeros(T, N, dtype=torch.float64)
    for t in range(T):
        for n in range(N):
            expected_TN[t, n] = float(bias_N[n])
            for k in range(K):
                column = k if perm is None else int(perm[k])
                expected_TN[t, n] += float(x_TK[t, column]) * value_of(n, k, codes_NK, scale_NG, zero_NG, table)
    out_TN = torch.empty(T, N)
    packed.packed_linear(x_TK, packed.pack_codes(weight), out_TN)
    torch.testing.assert_close(out_TN, expected_TN.float(), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(x_TK @ dequantize(weight).T + bias_N, out_TN)


def test_the_low_half_of_a_byte_is_the_even_column():
    codes = torch.tensor([[1, 2, 15, 0]])
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]
    assert unpack_nibbles(pack_nibbles(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_an_int8_product_rounds_its_input_by_row_or_by_the_given_scale(input_scale):
    generator = torch.Generator().manual_seed(1)
    codes_NK = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    scale_N = torch.rand(N, generator=generator)
    x_TK = torch.randn(T, K, generator=generator)
    given = None if input_scale is None else torch.tensor([input_scale])
    out_TN = torch.empty(T, N)
    weight = Int8Weight(N, K, torch.float32, codes_NK, scale=scale_N, input_scale=given)
    packed.int8_linear(x_TK, packed.pack_int8(weight), out_TN)
    for t in range(T):
        scale = input_scale or max(abs(float(x)) for x in x_TK[t]) / 127
        codes = [max(-127, min(127, round(float(x) / scale))) for x in x_TK[t]]
        for n in range(N):
            whole = sum(code * int(codes_NK[n, k]) for k, code in enumerate(codes))
            assert float(out_TN[t, n]) == pytest.approx(whole * scale * float(scale_N[n]), rel=1e-5)
