"""Codes in tiles: their numbers are exact, products are the references', a row can be made independent of its batch."""

import functools

import pytest
import torch

pytest.importorskip("triton")

from tests.oracles.operations import packed as reference

from quire.kernels import packed
from quire.kernels.triton.launch import interpreted
from quire.kernels.triton.packed import matmul as module
from quire.kernels.triton.packed import tiles as packed_tiles
from quire.kernels.triton.packed.layout import Tiles, _table_assembly, layout_of
from quire.kernels.types import PackedWeight

DEVICE = "cpu" if interpreted() else "cuda"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor([-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0, 0.07958, 0.16093, 0.24611,
                    0.33792, 0.44071, 0.56262, 0.72296, 1.0])  # fmt: skip
KINDS = ("whole 4", "float 4", "table 4", "whole 8", "float 8")


def make(kind, n, k, group, dtype=torch.bfloat16, *, has_bias=True, is_permuted=False):
    draw = torch.Generator().manual_seed(n + k + group)
    codes = torch.randint(-128, 128, (n, k), generator=draw).to(torch.int8)
    if kind.endswith("4"):
        codes = packed.pack_nibbles(torch.randint(0, 16, (n, k), generator=draw))
    elif kind == "float 8":
        codes = codes.view(torch.float8_e4m3fn).float().nan_to_num(1.0).to(torch.float8_e4m3fn)
    groups = k // group
    return PackedWeight(
        n, k, dtype, codes.to(DEVICE), bias=torch.randn(n, generator=draw).to(DEVICE) if has_bias else None,
        scale=((torch.rand(n, groups, generator=draw) + 0.5) * 2.0**-4).to(DEVICE),
        zero=torch.randint(0, 17, (n, groups), generator=draw).float().to(DEVICE) if kind == "whole 4" else None,
        table={"float 4": E2M1, "table 4": NF4.to(dtype).float()}[kind].to(DEVICE) if kind in ("float 4", "table 4") else None,
        perm=torch.randperm(k, generator=draw).int().to(DEVICE) if is_permuted else None,
    )  # fmt: skip


def error_of(got_TN, x_TK, weight, added_TN=0.0):
    expected_TN = torch.empty(x_TK.shape[0], weight.out_features, device=DEVICE)
    reference.packed_linear(x_TK, weight, expected_TN)
    expected_TN += added_TN
    return ((got_TN.float() - expected_TN).norm() / expected_TN.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(130, 256, 128), (40, 128, 32), (128, 192, 64), (24, 128, 16), (16, 256, 256)]
)
def test_a_band_is_the_matrix(kind, n, k, group, dtype):
    weight = make(kind, n, k, group, dtype, has_bias=False)
    prepared = module.pack_codes(weight)
    assert isinstance(prepared.layout, Tiles)
    x_TK = torch.eye(k, device=DEVICE, dtype=dtype)
    out_TN = torch.empty(k, n, device=DEVICE, dtype=dtype)
    packed_tiles.launch_bands(x_TK, prepared, out_TN)
    # The interpreter cuts bfloat16 off where a device rounds it.
    torch.testing.assert_close(out_TN.T.float(), packed.dequantize(weight), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), [(130, 512, 128), (40, 128, 32), (128, 192, 64), (24, 128, 16)])
def test_products_are_the_references(kind, n, k, group):
    weight = make(kind, n, k, group, is_permuted=n == 40, has_bias=n % 16 == 8)
    prepared = module.pack_codes(weight)
    assert isinstance(prepared.layout, Tiles)
    torch.manual_seed(0)
    for rows in (1, 19, 70):
        x_TK = torch.randn(rows, k, device=DEVICE).bfloat16()
        for function in (module.packed_linear, functools.partial(module.packed_linear, is_invariant=True)):
            out_TN = torch.full((rows + 1, n), float("nan"), device=DEVICE)
            function(x_TK, prepared, out_TN[:-1])
            assert out_TN[-1].isnan().all(), "wrote beyond its rows"
            assert error_of(out_TN[:-1], x_TK, weight) < 1e-5
        for function in (module.packed_linear_add, functools.partial(module.packed_linear_add, is_invariant=True)):
            residual_TN = torch.randn(rows, n, device=DEVICE)
            sum_TN = residual_TN.clone()
            function(x_TK, prepared, sum_TN)
            assert error_of(sum_TN, x_TK, weight, residual_TN) < 1e-5


@pytest.mark.parametrize("is_added", [False, True])
def test_many_rows_are_multiplied_band_by_band(is_added, monkeypatch):
    monkeypatch.setattr(packed_tiles, "BAND_VALUES", 128 * 256)
    packed_tiles.reserve_band.cache_clear()
    weight = make("whole 4", 300, 256, 64, is_permuted=True)
    prepared = module.pack_codes(weight)
    torch.manual_seed(0)
    x_TK = torch.randn(5, 256, device=DEVICE).bfloat16()
    start_TN = (
        torch.randn(5, 300, device=DEVICE).bfloat16() if is_added else torch.zeros(5, 300, device=DEVICE).bfloat16()
    )
    out_TN = start_TN.clone()
    packed_tiles.launch_bands(x_TK, prepared, out_TN, add=is_added)
    packed_tiles.reserve_band.cache_clear()
    assert error_of(out_TN, x_TK, weight, start_TN.float()) < 2.0**-7


def test_a_row_does_not_depend_on_the_batch_where_that_is_asked_for():
    prepared = module.pack_codes(make("whole 4", 70, 256, 64))
    torch.manual_seed(0)
    x_TK = torch.randn(70, 256, device=DEVICE).bfloat16()
    whole = torch.empty(70, 70, device=DEVICE)
    functools.partial(module.packed_linear, is_invariant=True)(x_TK, prepared, whole)
    for rows in (1, 33):
        out_TN = torch.empty(rows, 70, device=DEVICE)
        functools.partial(module.packed_linear, is_invariant=True)(x_TK[:rows], prepared, out_TN)
        assert torch.equal(out_TN, whole[:rows])


def permuted(assembly, registers):
    """What a few lines of a GPU's language give, of registers of 32 bits: those that are named $0, $1 ..., some of them given."""
    registers = dict(registers)

    def value(text):
        return int(text, 0) if text[0].isdigit() else registers[text]

    def bytes_of(word, kind):
        return [each - 256 * (kind == "s32" and each > 127) for each in word.to_bytes(4, "little")]

    for line in assembly[assembly.index(";") + 1 : assembly.rindex("}")].strip(" ;").split(";"):
        name, out, *given = line.replace(",", " ").split()
        first, *others = map(value, given)
        match name:
            case "mov.b32":
                got = first
            case "shr.u32":
                got = first >> others[0]
            case "shl.b32":
                got = first << others[0]
            case "add.s32":
                got = first + others[0]
            case "and.b32":
                got = first & others[0]
            case "lop3.b32":
                assert others[2] == 0xEA
                got = (first & others[0]) | others[1]
            case "dp4a.u32.u32" | "dp4a.u32.s32":
                pairs = zip(bytes_of(first, "u32"), bytes_of(others[0], name[-3:]), strict=True)
                got = others[1] + sum(one * other for one, other in pairs)
            case "prmt.b32":
                pool = [*first.to_bytes(4, "little"), *others[0].to_bytes(4, "little")]
                picks = [others[1] >> 4 * place & 15 for place in range(4)]
                assert max(picks) < 8, "the highest bit would spread a sign"
                got = int.from_bytes(bytes(pool[pick] for pick in picks), "little")
        registers[out] = got & 0xFFFFFFFF
    return registers


def test_a_table_is_looked_up_by_permutations_of_bytes():
    kind = layout_of(make("table 4", 16, 128, 32)).kind
    bits = NF4.bfloat16().view(torch.int16)
    for words in torch.randint(0, 1 << 32, (100,)).tolist():
        registers = permuted(_table_assembly(kind), {"$4": words})
        for part in range(4):
            both = [int(bits[words >> shift + 4 * part & 15]) & 0xFFFF for shift in (0, 16)]
            assert registers[f"${part}"] == both[0] | both[1] << 16


def test_what_the_tensor_cores_cannot_have_exactly_stays_as_it_is():
    fractions = make("whole 4", 32, 128, 32)
    fractions.zero = fractions.zero + 0.3
    table = make("table 4", 32, 128, 32)
    table.zero = torch.zeros_like(table.scale)
    assert layout_of(fractions) is None and layout_of(table) is None
    assert layout_of(make("whole 4", 32, 128, 32, torch.float32)) is None
    assert layout_of(make("whole 4", 32, 72, 24)) is None
