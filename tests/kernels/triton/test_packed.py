"""Packed (not in tiles) and int8 products in Triton against their references; the kernels compile for Hopper without a GPU."""

import functools
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.oracles.operations import packed as reference

from quire.kernels import packed
from quire.kernels.triton.launch import interpreted
from quire.kernels.triton.packed import matmul as module
from quire.kernels.types import Int8Weight, PackedWeight

DEVICE = "cpu" if interpreted() else "cuda"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FORMATS = {
    "int4": {"zero": 8.0},
    "int4 with zeros": {"zero": "broken"},
    "e2m1": {"table": E2M1},
    "table and zeros": {"table": torch.linspace(-1, 1, 16) ** 3, "zero": "broken"},
    "int8": {"bits": 8},
    "int8 with zeros": {"bits": 8, "zero": "broken"},
    "float8": {"bits": 8, "is_float": True},
}
SHAPES = [(32, 128, 128), (70, 128, 16), (33, 96, 32), (20, 80, 80), (9, 36, 36)]


def make(n, k, group, *, bits=4, zero=None, table=None, is_permuted=False, has_bias=True, is_float=False):
    draw = torch.Generator().manual_seed(n + k)
    groups = k // group
    codes = torch.randint(-128, 128, (n, k), generator=draw).to(torch.int8)
    if bits == 4:
        codes = packed.pack_nibbles(torch.randint(0, 16, (n, k), generator=draw))
    if is_float:
        codes = (torch.randn(n, k, generator=draw) * 20).to(torch.float8_e4m3fn)
    scale = (torch.rand(n, groups, generator=draw) + 0.5) * 2.0**-4
    zeros = torch.full((n, groups), zero) if isinstance(zero, float) else None
    if zero == "broken":
        zeros = torch.rand(n, groups, generator=draw) * 4 - 2
    return PackedWeight(
        n, k, torch.float32, codes.to(DEVICE), bias=torch.randn(n, generator=draw).to(DEVICE) if has_bias else None,
        scale=scale.to(DEVICE), zero=None if zeros is None else zeros.to(DEVICE),
        table=None if table is None else table.to(DEVICE),
        perm=torch.randperm(k, generator=draw).int().to(DEVICE) if is_permuted else None,
    )  # fmt: skip


def multiply(function, x_TK, weight, dtype=torch.float32):
    out_TN = torch.full((x_TK.shape[0] + 1, weight.out_features), float("nan"), dtype=dtype, device=DEVICE)
    function(x_TK, weight, out_TN[:-1])
    assert out_TN[-1].isnan().all(), "wrote beyond its rows"
    return out_TN[:-1]


def expected_of(x_TK, weight):
    out_TN = torch.empty(x_TK.shape[0], weight.out_features, device=DEVICE)
    reference.packed_linear(x_TK, weight, out_TN)
    return out_TN


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_products_are_the_references(name, n, k, group):
    weight = make(n, k, group, **FORMATS[name], is_permuted=k % 3 == 0, has_bias=n % 2 == 0)
    prepared = module.pack_codes(weight)
    for rows in (1, 3, 20):
        x_TK = torch.randn(rows, k, device=DEVICE)
        for function in (module.packed_linear, functools.partial(module.packed_linear, is_invariant=True)):
            torch.testing.assert_close(
                multiply(function, x_TK, prepared), expected_of(x_TK, weight), atol=2e-4, rtol=2e-4
            )


@pytest.mark.parametrize("rows", [1, 20])
def test_inputs_in_bfloat16_give_what_rounding_explains(rows):
    weight = make(64, 256, 64, zero="broken")
    x_TK = torch.randn(rows, 256, device=DEVICE).bfloat16()
    expected = expected_of(x_TK, weight)
    error = multiply(module.packed_linear, x_TK, module.pack_codes(weight), torch.bfloat16).float() - expected
    assert error.norm() < 2.0**-7 * expected.norm()


def test_a_row_does_not_depend_on_the_batch_where_that_is_asked_for():
    prepared = module.pack_codes(make(70, 256, 32, zero="broken"))
    x_TK = torch.randn(70, 256, device=DEVICE)
    whole = multiply(functools.partial(module.packed_linear, is_invariant=True), x_TK, prepared)
    for rows in (1, 5, 33):
        assert torch.equal(
            multiply(functools.partial(module.packed_linear, is_invariant=True), x_TK[:rows], prepared), whole[:rows]
        )


def test_scales_are_narrowed_only_without_loss():
    weight = make(4, 64, 32)
    assert module.pack_codes(weight).scale.dtype is torch.float32
    weight.scale = weight.scale.half().float()
    prepared = module.pack_codes(weight)
    assert prepared.scale.dtype is torch.float16 and torch.equal(prepared.scale.float(), weight.scale)


@pytest.mark.parametrize("input_scale", [None, 0.02])
@pytest.mark.parametrize(("n", "k"), [(5, 32), (70, 100), (64, 256)])
def test_int8_products_are_the_references(n, k, input_scale):
    weight = Int8Weight(
        n, k, torch.bfloat16, torch.randint(-128, 128, (n, k)).to(torch.int8).to(DEVICE), bias=torch.randn(n).to(DEVICE),
        scale=(torch.rand(n) * 0.01).to(DEVICE),
        input_scale=None if input_scale is None else torch.tensor([input_scale], device=DEVICE),
    )  # fmt: skip
    prepared = module.pack_int8(weight)
    for rows in (1, 17, 40):
        x_TK = torch.randn(rows, k, device=DEVICE)
        x_TK[0, 0] = 1e4
        expected_TN = torch.empty(rows, n, device=DEVICE)
        reference.int8_linear(x_TK, weight, expected_TN)
        torch.testing.assert_close(multiply(module.int8_linear, x_TK, prepared), expected_TN, atol=1e-5, rtol=1e-5)


def test_rows_that_lie_apart_are_refused():
    prepared = module.pack_codes(make(32, 64, 32))
    with pytest.raises(ValueError, match="rows must lie together"):
        module.packed_linear(torch.randn(2, 128, device=DEVICE)[:, ::2], prepared, torch.empty(2, 32, device=DEVICE))


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quire.kernels.triton.packed import dot as packed_dot
from quire.kernels.triton.experts import packed as packed_experts
from quire.kernels.triton.packed import gemv as packed_gemv
from quire.kernels.triton.packed import int8 as packed_int8
from quire.kernels.triton.packed import tiles as packed_tiles
from quire.kernels.triton.packed import vector as packed_vector

def some(*forms):
    return forms if sys.argv[1] == "all" else forms[:1]

def compiled(kernel, warps, types, **constants):
    types = {"x_ptr": "*bf16", "scale_ptr": "*fp16", "zero_ptr": "*fp16", "w_ptr": "*u8", "out_ptr": "*bf16"} | types
    types |= {name: "*i32" for name in ("perm_ptr", "counter_ptr")}
    default = lambda name: "*fp32" if name.endswith("_ptr") else "i32"
    signature = {name: "constexpr" if name in constants else types.get(name, default(name)) for name in kernel.arg_names}
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = [name for name in signature if signature[name].startswith("*") or name in ("N", "K")]
    source = ASTSource(
        kernel, signature, {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

form = dict(IS_FLOAT=False, HAS_ZERO=True, HAS_TABLE=False, HAS_PERM=False, HAS_BIAS=False, PDL=True)
for bits, codes, group, table, rows in some((4, "*u8", 128, False, 1), (4, "*u8", 32, True, 1), (8, "*i8", 128, False, 4)):
    given = form | dict(K=4096, GROUP=group, BITS=bits, HAS_TABLE=table)
    run = 32 if bits == 4 else 16
    vector = compiled(
        packed_gemv.packed_gemv_kernel, 4, {"w_ptr": codes}, T=rows, BLOCK_N=8, BLOCK_K=128 * run, RUN=run, **given
    )
    assert "evict_first.L2::cache_hint.v4.b32" in vector.asm["ptx"], "a thread's codes are not one load"
    for block_t, split in some((16, 4), (128, 1)):
        dot = compiled(
            packed_dot.packed_dot_kernel, 4, {"w_ptr": codes}, BLOCK_T=block_t, BLOCK_N=64,
            BLOCK_K=packed_dot.block_k_of(group, 4096), SPLIT=split, STAGES=3, **given,
        )
        assert dot.metadata.shared <= 227 * 1024 and "mma" in dot.asm["ptx"]
for kind, columns, share in some((0, 128, 1), (1, 128, 4), (2, 64, 2), (3, 64, 2)):
    given = dict(GROUP=32, COLUMNS=columns, WORDS=32, SHARE=share, KIND=kind, ASSEMBLY=True, PDL=True, K=4096)
    types = {"w_ptr": "*i16", "scale_ptr": "*i32"}
    expand = compiled(packed_tiles.expand_kernel, 4, types, **given)
    tiles = compiled(
        packed_tiles.tiles_kernel, 4, types, HAS_PERM=False, HAS_BIAS=True, ADD=True, BLOCK_T=16, BLOCK_N=128,
        MOST=16, STAGES=4, **given,
    )
    assert tiles.metadata.shared * packed_tiles.PROGRAMS[16] <= 227 * 1024
    assert "wgmma" in tiles.asm["ptx"], "numbers go to the tensor cores from registers"
for group, act, eights in some((128, 0, 4), (64, -1, 2)):
    vector = compiled(
        packed_vector.vector_kernel, 4, {"w_ptr": "*i16", "scale_ptr": "*i32"}, K=4096, GROUP=group, ACTIVATION=act,
        ADD=act < 0, R=eights, ASSEMBLY=True, PDL=True, bias_ptr=None,
    )
    ptx = vector.asm["ptx"]
    for each in ("dp4a.u32.s32", "max.u16x2", "evict_first.L2::cache_hint.v4.b32"):
        assert each in ptx, each
    assert ptx.index("evict_first") < ptx.index("griddepcontrol.wait"), "codes are not asked for before the wait"
    assert ptx.count("bar.sync") <= 2, "numbers stay with their threads"
shape = dict(WIDTH=2880, K=2944, GROUP=32, COLUMNS=128, WORDS=32, SHARE=4, CODES=1, ROW_DIVISOR=4, ACTIVATION=-1, SCALED=False)
shape |= dict(KIND=0, WEIGHTED=False, CLAMPED=True, ALPHA=1.702, LIMIT=7.0, BLOCK_E=32, ASSEMBLY=True, PDL=True)
for config in some(packed_experts.FEW[8], packed_experts.SOME[64], packed_experts.MANY):
    experts = compiled(
        packed_experts.packed_experts_kernel, config.num_warps,
        {"w_ptr": "*i16", "scale_ptr": "*i32", "counts_ptr": "*i32", "lists_ptr": "*i32"}, BLOCK_T=config.block_t,
        SCALES_CODES=config.scales_codes, MOST=8 if config.splits else 1, STAGES=config.stages, **shape,
    )
    assert experts.metadata.shared <= 227 * 1024 // 2
    assert ("wgmma" if config.block_t > 8 else "mma.sync") in experts.asm["ptx"]
    assert "cp.async" in experts.asm["ptx"], "tiles come while others are multiplied"
whole = compiled(
    packed_int8._int8_dot, 4, {"x_ptr": "*i8", "w_ptr": "*i8"}, K=4096, HAS_BIAS=True,
    BLOCK_T=128, BLOCK_N=64, BLOCK_K=128, STAGES=3, PDL=True
)
assert whole.metadata.shared <= 227 * 1024 and "mma" in whole.asm["ptx"]
"""


@pytest.mark.parametrize("forms", ["one of each", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_the_kernels_compile_for_hopper_and_fit_a_multiprocessor(forms):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, forms]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
