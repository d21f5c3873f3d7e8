"""Products with packed and int8 weights on the native library, against what the formats say and against float64.

Legend as in `kernels/packed.py`: T rows, N outputs, K inputs, G groups.
"""

import dataclasses
import itertools

import pytest
import torch
from tests.oracles.operations import packed as reference

from quire.kernels import cpu, ops, packed, registry
from quire.kernels.cpu import recording
from quire.kernels.types import Int8Weight, PackedWeight

cpu.register()
ops.select("cpu")
pytestmark = pytest.mark.skipif(not cpu.library_status()[0], reason=f"no library: {cpu.library_status()[2]}")
native = pytest.importorskip("quire.kernels.cpu.packed")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
WIDE = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).float()
NORMAL = torch.erfinv(torch.linspace(-0.96, 0.96, 16))
"""Tables: within seven bits; within fourteen; multiples of nothing, as NF4's."""
FORMATS = {
    "int4": {},
    "int4 with zeros": {"zero": "whole"},
    "int4 with broken zeros": {"zero": "broken"},
    "e2m1": {"table": E2M1},
    "wide table": {"table": WIDE},
    "normal table": {"table": NORMAL},
    "table and zeros": {"table": E2M1, "zero": "broken"},
    "int8": {"bits": 8},
    "int8 with zeros": {"bits": 8, "zero": "whole"},
}
SHAPES = [(1, 8, 8), (16, 64, 32), (33, 256, 64), (40, 384, 128), (100, 96, 16), (70, 520, 520), (7, 100, 100)]
ROWS = (1, 2, 3, 5, 7, 11, 12, 13, 25, 40)


@pytest.fixture(autouse=True)
def two_threads():
    cpu.set_num_threads(2)
    yield
    cpu.set_num_threads(2)


def make(n, k, group, *, bits=4, zero=None, table=None, is_permuted=False, has_bias=False, seed=0):
    draw = torch.Generator().manual_seed(seed + n + k)
    groups = k // group
    if bits == 4:
        codes = packed.pack_nibbles(torch.randint(0, 16, (n, k), generator=draw))
    else:
        codes = torch.randint(-128, 128, (n, k), generator=draw).to(torch.int8)
    scale = (torch.rand(n, groups, generator=draw) + 0.5).half().float() * 2.0**-9
    zeros = {
        None: None if bits == 8 or table is not None else torch.full((n, groups), 8.0),
        "whole": torch.randint(0, 16, (n, groups), generator=draw).float(),
        "broken": torch.rand(n, groups, generator=draw) * 4 - 2,
    }[zero]
    bias = torch.randn(n, generator=draw) if has_bias else None
    perm = torch.randperm(k, generator=draw).int() if is_permuted else None
    return PackedWeight(n, k, torch.bfloat16, codes, bias=bias, scale=scale, zero=zeros, table=table, perm=perm)


def multiply(function, x_TK, weight):
    out_TN = torch.full((x_TK.shape[0] + 1, weight.out_features), float("nan"))
    function(x_TK, weight, out_TN[:-1])
    assert out_TN[-1].isnan().all(), "wrote beyond its rows"
    return out_TN[:-1]


def product(x_TK, weight):
    """In float64, and the same of magnitudes."""
    values_NK = packed.dequantize(weight).double()
    out = x_TK.double() @ values_NK.T
    return out if weight.bias is None else out + weight.bias, x_TK.double().abs() @ values_NK.abs().T


def largest_of_blocks(x_TK, weight, block):
    """Each value's replacement by the largest magnitude that is rounded with it, in the weight's order of columns."""
    ordered = x_TK if weight.perm is None else x_TK[:, weight.perm.long()]
    parts = [part.abs().amax(1, keepdim=True).expand_as(part) for part in ordered.split(block, 1)]
    return torch.cat(parts, 1).double()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_products_with_inputs_as_they_are_are_exact(name, n, k, group):
    weight = make(n, k, group, **FORMATS[name], is_permuted=k % 3 == 0, has_bias=n % 2 == 0)
    prepared = native.pack_codes(dataclasses.replace(weight))
    for rows in ROWS:
        x_TK = torch.randn(rows, k)
        expected, size = product(x_TK, weight)
        got = multiply(native.packed_linear_exact, x_TK, prepared)
        assert ((got - expected).abs() <= (size + expected.abs()) * 1e-6 + 1e-6).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_rounding_inputs_moves_products_by_no_more_than_half_a_step_of_each_block(name, n, k, group):
    weight = make(n, k, group, **FORMATS[name], is_permuted=k % 3 == 0, has_bias=n % 2 == 0)
    prepared = native.pack_codes(dataclasses.replace(weight))
    block = 32 if group == k else min(group, 32)
    for rows in ROWS:
        x_TK = torch.randn(rows, k)
        expected, size = product(x_TK, weight)
        in_order = dataclasses.replace(weight, perm=None)
        _, half_steps = product(largest_of_blocks(x_TK, weight, block) / 254, in_order)
        table_steps = size.new_zeros(()) if weight.table is not NORMAL else size.max() * 2.0**-13
        bound = half_steps * 1.001 + (size + expected.abs()) * 1e-6 + 1e-6 + table_steps
        got = multiply(native.packed_linear, x_TK, prepared)
        assert ((got - expected).abs() <= bound).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "normal table"])
def test_inputs_that_int8_holds_lose_nothing(name):
    weight = make(48, 256, 64, **FORMATS[name])
    x_TK = torch.randint(-127, 128, (9, 256)).float()
    x_TK[:, ::32] = 127  # so that a step is 1
    expected, size = product(x_TK, weight)
    got = multiply(native.packed_linear, x_TK, native.pack_codes(weight))
    assert ((got - expected).abs() <= size * 1e-6).all()


def test_a_gaussians_products_are_half_a_percent_off_on_average():
    weight = make(256, 1024, 32)
    x_TK = torch.randn(16, 1024)
    expected, _ = product(x_TK, weight)
    error = multiply(native.packed_linear, x_TK, native.pack_codes(weight)) - expected
    assert 0.002 < error.norm() / expected.norm() < 0.0075


@pytest.mark.parametrize("function", [native.packed_linear, native.packed_linear_exact])
@pytest.mark.parametrize("name", ["int4", "normal table", "int8 with zeros"])
def test_a_row_does_not_depend_on_the_batch_or_the_threads(name, function):
    prepared = native.pack_codes(make(200, 512, 64, **FORMATS[name]))
    x_TK = torch.randn(64, 512)
    whole = multiply(function, x_TK, prepared)
    for threads, rows in itertools.product((1, 2, 3), (1, 2, 3, 5, 6, 7, 13, 31)):
        cpu.set_num_threads(threads)
        assert torch.equal(multiply(function, x_TK[:rows], prepared), whole[:rows])


def test_scales_beyond_float16_are_kept_as_they_are():
    weight = make(32, 64, 32)
    assert weight.scale is not None
    weight.scale *= torch.tensor([1.0, 1e-12])
    weight.scale[3, 1] *= 1 + 2.0**-20
    x_TK = torch.cat([torch.zeros(2, 32), torch.randn(2, 32)], 1)
    expected, size = product(x_TK, weight)
    got = multiply(native.packed_linear_exact, x_TK, native.pack_codes(weight))
    assert ((got - expected).abs() <= size * 1e-6).all() and got[:, 3].any()


def test_rows_of_zeros_and_of_huge_values_give_zeros_and_what_they_should():
    weight = make(16, 64, 32)
    prepared = native.pack_codes(dataclasses.replace(weight))
    assert not multiply(native.packed_linear, torch.zeros(3, 64), prepared).any()
    x_TK = torch.randn(2, 64) * 1e30
    expected, _ = product(x_TK, weight)
    error = multiply(native.packed_linear, x_TK, prepared) - expected
    assert error.norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_a_value_that_is_no_number_says_so_and_others_do_not(bad):
    x_TK = torch.randn(5, 64)
    x_TK[3, 40] = bad
    int8 = native.pack_int8(
        Int8Weight(16, 64, torch.bfloat16, torch.ones(16, 64, dtype=torch.int8), scale=torch.ones(16))
    )
    for function, weight in (
        (native.packed_linear, native.pack_codes(make(16, 64, 32))),
        (native.int8_linear, int8),
    ):
        out_TN = multiply(function, x_TK, weight)
        assert not out_TN[3].isfinite().any() and out_TN[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("input_scale", [None, 0.02, 0.001])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 64), (37, 101), (200, 1000)])
def test_int8_products_are_the_references(n, k, input_scale):
    weight = Int8Weight(
        n, k, torch.bfloat16, torch.randint(-128, 128, (n, k)).to(torch.int8), bias=torch.randn(n),
        scale=torch.rand(n) * 0.01, input_scale=None if input_scale is None else torch.tensor([input_scale]),
    )  # fmt: skip
    prepared = native.pack_int8(weight)
    for rows in ROWS:
        x_TK = torch.randn(rows, k)
        expected_TN = torch.empty(rows, n)
        reference.int8_linear(x_TK, weight, expected_TN)
        torch.testing.assert_close(multiply(native.int8_linear, x_TK, prepared), expected_TN, atol=2e-6, rtol=2e-6)


def test_a_recorded_product_is_replayed_for_fewer_rows():
    prepared = native.pack_codes(make(40, 64, 32, has_bias=True))
    x_TK, out_TN = torch.randn(30, 64), torch.zeros(30, 40)
    step = recording.record(lambda: native.packed_linear(x_TK, prepared, out_TN), 30, 31)
    assert step is not None
    expected = out_TN.clone()
    for rows in (1, 7, 30):
        out_TN.zero_()
        step.replay(rows, 0)
        assert torch.equal(out_TN[:rows], expected[:rows]) and not out_TN[rows:].any()


def test_deterministic_chooses_products_with_inputs_as_they_are():
    for deterministic, function in ((False, native.packed_linear), (True, native.packed_linear_exact)):
        choice = registry.choose("packed_linear", "cpu", deterministic=deterministic)
        assert choice.chosen.function is function


def test_what_cannot_be_multiplied_is_refused_with_its_reason():
    with pytest.raises(ValueError, match="groups have 12 columns; the CPU kernels take multiples of 8"):
        native.pack_codes(make(16, 24, 12))
    weight = make(16, 64, 32)
    with pytest.raises(ValueError, match="choose `pack_codes` and `packed_linear` together"):
        native.packed_linear(torch.randn(1, 64), weight, torch.empty(1, 16))
    prepared = native.pack_codes(weight)
    with pytest.raises(ValueError, match=r"x must be a contiguous CPU tensor of torch\.float32"):
        native.packed_linear(torch.randn(1, 64).bfloat16(), prepared, torch.empty(1, 16))
    with pytest.raises(ValueError, match="packed by another kernel"):
        packed.dequantize(prepared)
    weight = make(16, 64, 32, bits=8)
    with pytest.raises(ValueError, match=r"codes are torch\.float8_e4m3fn; the CPU kernels take codes of 4 bits"):
        native.pack_codes(dataclasses.replace(weight, data=torch.zeros(16, 64).to(torch.float8_e4m3fn)))
