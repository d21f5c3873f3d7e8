"""Float8 operations in Triton against their references, and against float32 within what rounding explains."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.oracles.operations import fp8 as reference

from quire.kernels import registry
from quire.kernels.fp8 import FP8_MAX
from quire.kernels.norm import ACTIVATIONS
from quire.kernels.triton.fp8 import matmul as fp8
from quire.kernels.triton.fp8.quantize import quantize_rows
from quire.kernels.triton.fp8.row_products import Tile, multiply_rows
from quire.kernels.triton.fp8.scales import apply_scales
from quire.kernels.triton.fp8.vector import VectorTile, multiply_vectors
from quire.kernels.triton.launch import interpreted
from quire.kernels.types import FP8, Fp8Scratch, Fp8Weight

DEVICE = "cpu" if interpreted() else "cuda"
EPS = 1e-5
HALF_STEP = 2.0**-4
"""Largest relative error of rounding to float8's three bits (of what is not subnormal)."""


@pytest.fixture(autouse=True)
def exact_float8(monkeypatch):
    """Triton's interpreter rounds to float8 without carrying into the exponent: PyTorch converts instead."""
    if not interpreted():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    convert, torch_types = interpreter._convert_float, {"fp32": torch.float32, "fp16": torch.float16, "fp8e4nv": FP8}

    def convert_float(values, source, target, rounding):
        if "fp8e4nv" not in (str(source), str(target)) or not {str(source), str(target)} <= set(torch_types):
            return convert(values, source, target, rounding)
        bits = torch.from_numpy(np.array(values).view(np.dtype(f"uint{source.primitive_bitwidth}")))
        converted = bits.view(torch_types[str(source)]).to(torch_types[str(target)])
        unsigned = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[target.primitive_bitwidth]
        return converted.view(unsigned).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


def drawn(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def make_weight(outputs, inputs, *, bias=False, input_scale=None, seed=0):
    values = drawn(outputs, inputs, seed=seed, dtype=torch.float32, scale=inputs**-0.5)
    scale = values.abs().amax(1) / FP8_MAX
    return Fp8Weight(
        outputs, inputs, torch.bfloat16, (values / scale[:, None]).to(FP8),
        bias=drawn(outputs, seed=1, dtype=torch.float32) if bias else None, scale=scale,
        input_scale=None if input_scale is None else torch.tensor([input_scale], device=DEVICE),
    )  # fmt: skip


def scratch(rows=80, inputs=256):
    return Fp8Scratch(rows, inputs, torch.device(DEVICE))


def normed(x, norm):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * norm


def poisoned(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def exact_product(x, weight):
    out = x.float() @ reference.dequantize(weight).T
    return out if weight.bias is None else out + weight.bias


def assert_near(got, expected, tolerance):
    """Within a share of the expected values' size: sums of random signs hide no error behind a large neighbour."""
    error = (got.float() - expected).norm() / expected.norm()
    assert error <= tolerance, f"relative error {error:.4f}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inputs", [64, 100, 384])
@pytest.mark.parametrize("static", [False, True])
def test_quantized_rows_are_the_references_to_the_bit(dtype, inputs, static):
    x = drawn(5, inputs, dtype=dtype, scale=30.0)
    x[2] = 0
    input_scale = torch.tensor([0.125], device=DEVICE) if static else None
    out, scale = torch.full((5, inputs), 7.0, device=DEVICE).to(FP8), poisoned(5, dtype=torch.float32)
    fp8.fp8_quantize(x, out, scale, input_scale)
    expected, expected_scale = reference.quantize(x, input_scale)
    assert torch.equal(out.float(), expected.float())
    assert torch.equal(scale, expected_scale)
    assert not out[2].float().any()


def test_what_is_beyond_a_static_scale_becomes_the_largest_number():
    x = torch.tensor([[1e4, -1e4, 448.0, 1.0] * 16], device=DEVICE)
    out, scale = torch.zeros(1, 64, device=DEVICE).to(FP8), poisoned(1, dtype=torch.float32)
    fp8.fp8_quantize(x, out, scale, torch.ones(1, device=DEVICE))
    assert out[0, :4].float().tolist() == [448.0, -448.0, 448.0, 1.0]


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_a_gated_activation_is_rounded_on_the_way(kind):
    x = drawn(3, 2 * 96, scale=2.0)
    out, scale = torch.zeros(3, 96, device=DEVICE).to(FP8), poisoned(3, dtype=torch.float32)
    quantize_rows(x, out, scale, kind=kind)
    gate, up = x.float().chunk(2, -1)
    expected = ACTIVATIONS[kind](gate) * up
    error = (out.float() * scale[:, None] - expected).abs()
    assert (error <= expected.abs() * HALF_STEP * 1.01 + scale[:, None] * 2.0**-10).all()


def test_a_norm_is_rounded_on_the_way():
    x, norm = drawn(3, 96, scale=5.0), drawn(96, dtype=torch.float32)
    out, scale = torch.zeros(3, 96, device=DEVICE).to(FP8), poisoned(3, dtype=torch.float32)
    quantize_rows(x, out, scale, norm_D=norm, eps=EPS)
    expected = normed(x, norm)
    error = (out.float() * scale[:, None] - expected).abs()
    assert (error <= expected.abs() * HALF_STEP * 1.01 + scale[:, None] * 2.0**-10).all()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", [(4, 128, 4), (8, 64, 4)])
@pytest.mark.parametrize("inputs", [128, 144, 256])
def test_vectors_are_multiplied_without_rounding_them(rows, shape, inputs):
    weight, x = make_weight(36, inputs, bias=True), drawn(rows, inputs)
    out = poisoned(rows + 1, 36, dtype=torch.float32)
    multiply_vectors(x, weight, out[:rows], tile=VectorTile(*shape))
    assert_near(out[:rows], exact_product(x, weight), 1e-5)
    assert out[rows].isnan().all()


@pytest.mark.parametrize(("rows", "kind", "add"), [(1, "silu", False), (3, "gelu_tanh", False), (2, "", True)])
def test_vectors_with_a_norm_before_and_a_gate_or_residual_after(rows, kind, add):
    weight, x = make_weight(40, 256, bias=True), drawn(rows, 256, scale=3.0)
    norm = drawn(256, dtype=torch.float32)
    expected = exact_product(normed(x, norm), weight)
    exact = torch.float32
    out = drawn(rows, 40, seed=9, dtype=exact) if add else poisoned(rows, 20, dtype=exact)
    if kind:
        gate, up = expected.chunk(2, -1)
        expected = ACTIVATIONS[kind](gate) * up
    if add:
        expected = expected + out.float()
    multiply_vectors(x, weight, out, norm_D=norm, eps=EPS, kind=kind, add=add, tile=VectorTile(4, 128, 4))
    assert_near(out, expected, 1e-5)


TILES = [Tile(64, 32, 16, 1, 4, 2), Tile(64, 64, 16, 2, 4, 2), Tile(128, 32, 32, 3, 4, 2), Tile(64, 128, 16, 8, 4, 2)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 128), (19, 80, 160), (33, 130, 96)])
def test_rows_in_float8_give_the_references_sums(tile, rows, outputs, inputs):
    weight, room = make_weight(outputs, inputs, bias=True), scratch()
    x, scale = reference.quantize(drawn(rows, inputs))
    out = poisoned(rows + 1, outputs, dtype=torch.float32)
    for _ in range(2):  # the second time finds the counters as the first left them
        multiply_rows(x, scale, weight, out[:rows], room, tile)
        expected = x.float() @ weight.data.float().T * scale[:, None] * weight.scale + weight.bias
        assert_near(out[:rows], expected, 1e-6)
        assert out[rows].isnan().all()
        assert not room.counters.any()


@pytest.mark.parametrize("tile", TILES[:3])
@pytest.mark.parametrize(("kind", "add"), [("silu", False), ("relu", False), ("", True)])
def test_rows_with_a_gate_or_residual_after(tile, kind, add):
    weight = make_weight(72, 160, bias=True)
    x, scale = reference.quantize(drawn(18, 160, scale=3.0))
    expected = x.float() @ weight.data.float().T * scale[:, None] * weight.scale + weight.bias
    exact = torch.float32
    out = drawn(18, 72, seed=9, dtype=exact) if add else poisoned(18, 36 if kind else 72, dtype=exact)
    if kind:
        gate, up = expected.chunk(2, -1)
        expected = ACTIVATIONS[kind](gate) * up
    if add:
        expected = expected + out
    multiply_rows(x, scale, weight, out, scratch(), tile, kind=kind, add=add)
    assert_near(out, expected, 1e-6)


@pytest.mark.parametrize("add", [False, True])
def test_scales_bias_and_residual_follow_a_product_without_them(add):
    weight, scale = make_weight(1200, 64, bias=True), drawn(3, dtype=torch.float32).abs()
    product, out = drawn(3, 1200, scale=1e4), drawn(3, 1200, seed=1, dtype=torch.float32)
    expected = product.float() * scale[:, None] * weight.scale + weight.bias + (out if add else 0)
    apply_scales(product, scale, weight, out, add=add)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_a_gated_product_without_its_scales_is_rounded_on_the_way():
    weight, x_scale = make_weight(2 * 96, 64, bias=True), drawn(3, dtype=torch.float32).abs() + 0.1
    product = drawn(3, 2 * 96, scale=300.0)
    out, scale = torch.zeros(3, 96, device=DEVICE).to(FP8), poisoned(3, dtype=torch.float32)
    quantize_rows(product, out, scale, kind="silu", product=(x_scale, weight))
    gate, up = (product.float() * x_scale[:, None] * weight.scale + weight.bias).chunk(2, -1)
    expected = ACTIVATIONS["silu"](gate) * up
    error = (out.float() * scale[:, None] - expected).abs()
    assert (error <= expected.abs() * HALF_STEP * 1.01 + scale[:, None] * 2.0**-10).all()


@pytest.mark.parametrize(("rows", "static"), [(1, False), (2, True), (17, False), (17, True), (70, False)])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_operation_agrees_with_its_reference(rows, static, invariant):
    """Rows that are not rounded are nearer to the truth than the reference, but no farther from it than rounding explains."""
    input_scale = 0.02 if static else None
    weight, room = make_weight(96, 128, bias=True, input_scale=input_scale), scratch()
    gate_up = make_weight(160, 128, seed=3, input_scale=input_scale)
    down = make_weight(128, 80, seed=4, input_scale=input_scale)
    x, norm = drawn(rows, 128), drawn(128, dtype=torch.float32)
    ways = ((reference, {}), (fp8, {"is_invariant": invariant}))

    def both(op, shape, start, *arguments):
        """The operation's output of each implementation; the output's place in the arguments is None."""
        results = []
        for module, way in ways:
            out = start.clone() if start is not None else poisoned(rows, shape)
            getattr(module, op)(*[out if argument is None else argument for argument in arguments], room, **way)
            results.append(out.float())
        return results

    tolerance = 6e-3 if invariant or rows > fp8.VECTOR_ROWS else 0.04
    wide, narrow, delta = poisoned(rows, 160), poisoned(rows, 80), poisoned(rows, 128)
    for expected, got in (
        both("fp8_linear", 96, None, x, weight, None),
        both("fp8_norm_linear", 96, None, x, norm, EPS, weight, None),
        both("fp8_norm_linear_gated", 80, None, x, norm, EPS, gate_up, "silu", None, wide),
        both("fp8_linear_add", 96, drawn(rows, 96, seed=5), x, weight, None, poisoned(rows, 96)),
    ):
        assert_near(got, expected, tolerance)
    # The hidden activation is rounded in between, from values that differ in their last bits.
    expected, got = both(
        "fp8_gated_mlp", 128, drawn(rows, 128, seed=6), None, norm, EPS, gate_up, "silu", down, wide, narrow, delta
    )
    assert_near(got, expected, 0.04)


def test_a_row_is_the_same_to_the_bit_whatever_stands_beside_it():
    weight, room, x = make_weight(96, 128), scratch(), drawn(70, 128)
    norm = drawn(128, dtype=torch.float32)
    whole = poisoned(70, 96, dtype=torch.float32)
    fp8.fp8_norm_linear(x, norm, EPS, weight, whole, room, is_invariant=True)
    for begin, end in ((0, 1), (3, 5), (20, 70)):
        out = poisoned(end - begin, 96, dtype=torch.float32)
        fp8.fp8_norm_linear(x[begin:end], norm, EPS, weight, out, room, is_invariant=True)
        assert torch.equal(out, whole[begin:end])


def test_a_deterministic_engine_gets_the_kernels_whose_rows_do_not_depend_on_others():
    for op in (op for op in registry.operations() if op.startswith("fp8_")):
        assert registry.choose(op, "cuda").chosen.platform == "cuda"
        assert registry.choose(op, "cuda", deterministic=True).chosen.invariant
        assert registry.choose(op, "cuda", deterministic=True).chosen.platform == "cuda"


def test_sums_that_float8_holds_are_exact():
    """Small whole numbers with scales of one: every product and every sum is exact, in any order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (20, 128), generator=generator).float()
    x[:, 0] = FP8_MAX  # so that the rows' scales are one
    values = torch.randint(-3, 4, (80, 128), generator=generator).float()
    weight = Fp8Weight(80, 128, torch.float32, values.to(FP8).to(DEVICE), scale=torch.ones(80, device=DEVICE))
    out = poisoned(20, 80, dtype=torch.float32)
    fp8.fp8_linear(x.to(DEVICE), weight, out, scratch())
    assert torch.equal(out.cpu(), x @ values.T)


def test_a_platform_without_a_gpu_says_why(monkeypatch):
    monkeypatch.setattr(fp8, "interpreted", lambda: False)
    monkeypatch.setattr(fp8.torch.cuda, "is_available", lambda: False)
    fp8.unavailable.cache_clear()
    try:
        assert fp8.unavailable() == "written in NVIDIA's assembly (PTX)"  # in the interpreter there is no NVIDIA
        fp8.unavailable.cache_clear()
        monkeypatch.setattr(fp8, "is_nvidia", lambda: True)
        assert fp8.unavailable() == "no GPU is visible"
    finally:
        fp8.unavailable.cache_clear()


def test_rows_that_no_program_can_hold_are_refused(monkeypatch):
    monkeypatch.setattr(fp8, "MAX_BLOCK", 64)
    with pytest.raises(ValueError, match="128 inputs; 64 are the most"):
        fp8.fp8_linear(drawn(3, 128), make_weight(64, 128), poisoned(3, 64), scratch(), is_invariant=True)
