"""Drawn cases of products with weights that are small codes, int8 or float8. Legend as in `case.py`; D hidden, I intermediate,
G groups."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from quire.conformance.cases.case import TOLERANCES, Case, Shapes, draw, empty, normal
from quire.conformance.cases.drawn_rows import norm_of
from quire.kernels.fp8 import FP8_MAX
from quire.kernels.types import FP8, Fp8Scratch, Fp8Weight, Int8Weight, PackedWeight
from quire.quantization.codes import E2M1

NF4 = torch.tensor(
    [
        -1.0,
        -0.69619,
        -0.52507,
        -0.39492,
        -0.28444,
        -0.18477,
        -0.09105,
        0.0,
        0.07958,
        0.16093,
        0.24611,
        0.33792,
        0.44071,
        0.56262,
        0.72296,
        1.0,
    ]
)
SIZES = {"int4": 4.0, "e2m1": 3.0, "table": 0.5, "int8": 64.0, "float8": 100.0}
"""About how large a code's value is."""
IN_TILES = ("int4", "int4 zeros", "e2m1", "table", "int8", "float8")
AS_STORED = ("int4 fractions", "e2m1 zeros", "table zeros", "int8 zeros")
SCALES = ("any", "half", "power")
ROWS = (1, 300, 3, 17, 700, 8, 64, 2, 130, 33)


def codes_of(
    rng: Shapes,
    kind: str,
    n: int,
    k: int,
    group: int,
    dtype: torch.dtype,
    scales: str = "any",
    may_permute: bool = True,
) -> PackedWeight:
    """A weight of small codes, as a checkpoint has it.

    Args:
        kind: a name in `SIZES`, and what there is of zeros: `zeros` (whole for int4), `fractions`.
        scales: any numbers, those that float16 holds, or powers of two.
    """
    name, _, zeros = kind.partition(" ")
    bits = torch.randint(0, 256, (n, k if name in ("int8", "float8") else k // 2)).to(torch.uint8)
    codes = bits.view(torch.int8) if name == "int8" else bits
    if name == "float8":
        codes = bits.view(FP8).float().nan_to_num(1.0).to(FP8)
    scale = (torch.rand(n, k // group) + 0.5) * k**-0.5 / SIZES[name]
    if scales != "any":
        scale = scale.half().float() if scales == "half" else torch.exp2(scale.log2().round())
    zero = torch.full_like(scale, 8.0) if kind == "int4" else None
    if zeros:
        zero = torch.randint(0, 17, scale.shape).float() if kind == "int4 zeros" else torch.rand(scale.shape) * 4 - 2
    table = {"e2m1": E2M1, "table": NF4.to(dtype).float()}.get(name)
    perm = torch.randperm(k).int() if may_permute and rng.chance(0.3) else None
    return PackedWeight(n, k, dtype, codes, scale=scale, zero=zero, table=table, perm=perm)


def _codes(
    rng: Shapes, dtype: torch.dtype, *, is_gated: bool = False, kinds: tuple[str, ...] = (), for_one: bool = False
) -> PackedWeight:
    """Every kind in turn. Float32 models have no tiles. `for_one`: a weight that such a kernel takes."""
    n, k = rng.of((128, 40, 130, 1024, 4096), (40, 130)), rng.of((128, 192, 512, 2048, 4096), (128, 192, 256))
    group = rng.choice([group for group in (16, 32, 64, 128) if k % group == 0] + [k])
    n = 2 * rng.of((128, 192, 1024), (64, 128)) if is_gated else n
    if for_one:
        n, k = rng.of((64, 192, 1024, 4096), (64, 128)), rng.of((1024, 2048, 4096), (1024,))
        group = rng.choice([64, 128, k])
    kind = rng.turn(kinds or (*IN_TILES, *AS_STORED))
    weight = codes_of(rng, kind, n, k, group, dtype, rng.choice(SCALES), may_permute=not for_one)
    weight.bias = normal(n) if rng.chance(0.3) else None
    return weight


def _case(before: list[Any], weight: PackedWeight, behind: list[Any], output: int, dtype: torch.dtype) -> Case:
    return Case([*before, weight, *behind], (output,), dtype)


@draw("packed_linear", rounds=len(IN_TILES) + len(AS_STORED))
def packed_linear(rng: Shapes, dtype: torch.dtype, **given: Any) -> Case:
    """A product."""
    t = given.pop("rows", rng.rows() if rng.is_small else rng.turn(ROWS))
    weight = _codes(rng, dtype, **given)
    out = empty(t, weight.out_features, dtype=rng.choice((dtype, torch.float32)))
    return _case([normal(t, weight.in_features, dtype=dtype)], weight, [out], 2, dtype)


@draw("packed_linear_add")
def packed_linear_add(rng: Shapes, dtype: torch.dtype, **given: Any) -> Case:
    """One added to a residual, of codes in tiles first."""
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    t = given.pop("rows", rng.rows() if rng.is_small else rng.turn(ROWS[::-1]))
    weight = _codes(rng, dtype, **given)
    residual = normal(t, weight.out_features, dtype=dtype)
    return _case([normal(t, weight.in_features, dtype=dtype)], weight, [residual], 2, dtype)


@draw("packed_norm_linear_gated")
def packed_norm_linear_gated(rng: Shapes, dtype: torch.dtype, **given: Any) -> Case:
    """With the norm before and the activation behind."""
    t, weight = given.pop("rows", rng.rows()), _codes(rng, dtype, is_gated=True, **given)
    n, k = weight.out_features, weight.in_features
    out = [empty(t, n // 2, dtype=dtype), empty(t, k, dtype=dtype), empty(t, n, dtype=dtype)]
    return _case(norm_of(rng, t, k, dtype), weight, [rng.choice(("silu", "gelu_tanh")), *out], 5, dtype)


def _draw_one(function: Callable[..., Case]) -> None:
    """One row times whole codes as a device may have kernels of their own for them."""

    @draw(f"{function.__name__}, one row")
    @functools.wraps(function)
    def _(rng: Shapes, dtype: torch.dtype) -> Case:
        return function(rng, torch.bfloat16, rows=1, kinds=("int4", "int4 zeros"), for_one=True)


for _function in (packed_linear, packed_linear_add, packed_norm_linear_gated):
    _draw_one(_function)


@draw("int8_linear")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k = rng.rows(), rng.width(), rng.width() + rng.choice((0, 36))
    weight = Int8Weight(
        n,
        k,
        dtype,
        torch.randint(-128, 128, (n, k)).to(torch.int8),
        bias=normal(n) if rng.chance(0.5) else None,
        scale=torch.rand(n) * 0.01,
        input_scale=torch.tensor([0.02]) if rng.chance(0.5) else None,
    )
    x, out = normal(t, k, dtype=dtype), empty(t, n, dtype=dtype)
    x[0, 0] = 300.0
    return Case([x, weight, out], (2,), dtype)


def _float8(rng: Shapes, n: int, k: int, dtype: torch.dtype, biased: bool = False) -> Fp8Weight:
    values = normal(n, k, scale=k**-0.5)
    scale = values.abs().amax(1) / FP8_MAX
    return Fp8Weight(
        n,
        k,
        dtype,
        (values / scale[:, None]).to(FP8),
        bias=normal(n) if biased else None,
        scale=scale,
        input_scale=torch.tensor([0.03]) if rng.chance(0.3) else None,
    )


def _float8_case(
    arguments: list[Any], output: int, t: int, dtype: torch.dtype, inputs: int, rounds_twice: bool
) -> Case:
    """With what float8 explains of an error."""
    tolerance, why = max(TOLERANCES[dtype], 6e-3), "a value at the border between two float8 may become the other one"
    if dtype == torch.bfloat16:
        tolerance, why = 0.02, f"{why}, and cuBLAS sums with few bits"
    if rounds_twice:
        tolerance, why = 0.04, f"{why}; so may the activation between two products"
    if t == 1:
        tolerance, why = 0.06, "one row is multiplied as it is, which is nearer to the truth than the reference"
    scratch = Fp8Scratch(t, inputs, torch.device("cpu"))
    return Case([*arguments, scratch], (output,), dtype, tolerance=tolerance, why=why)


@draw("fp8_quantize")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, k = rng.rows(), rng.width() + rng.choice((0, 36))
    x = normal(t, k, dtype=dtype, scale=30.0)
    x[0] = 0
    scale = torch.tensor([0.125]) if rng.chance(0.5) else None
    return Case([x, torch.zeros(t, k).to(FP8), empty(t, dtype=torch.float32), scale], (1, 2), dtype, exact=True)


@draw("fp8_linear")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k = rng.rows(), rng.width(), rng.width()
    weight = _float8(rng, n, k, dtype, rng.chance(0.5))
    return _float8_case([normal(t, k, dtype=dtype), weight, empty(t, n, dtype=dtype)], 2, t, dtype, k, False)


@draw("fp8_norm_linear")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k = rng.rows(), rng.width(), rng.width()
    arguments = [*norm_of(rng, t, k, dtype), _float8(rng, n, k, dtype, rng.chance(0.5)), empty(t, n, dtype=dtype)]
    return _float8_case(arguments, 4, t, dtype, k, False)


@draw("fp8_norm_linear_gated")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, i, k = rng.rows(), rng.width(), rng.width()
    arguments = [*norm_of(rng, t, k, dtype), _float8(rng, 2 * i, k, dtype), rng.choice(("silu", "gelu_tanh"))]
    arguments += [empty(t, i, dtype=dtype), empty(t, 2 * i, dtype=dtype)]
    return _float8_case(arguments, 5, t, dtype, k, False)


@draw("fp8_linear_add")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k = rng.rows(), rng.width(), rng.width()
    weight = _float8(rng, n, k, dtype, rng.chance(0.5))
    arguments = [normal(t, k, dtype=dtype), weight, normal(t, n, dtype=dtype), empty(t, n, dtype=dtype)]
    return _float8_case(arguments, 2, t, dtype, k, False)


@draw("fp8_gated_mlp")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, d, i = rng.rows(), rng.width(), rng.width()
    gate_up, down = _float8(rng, 2 * i, d, dtype), _float8(rng, d, i, dtype)
    arguments = [*norm_of(rng, t, d, dtype), gate_up, rng.choice(("silu", "gelu_tanh")), down]
    arguments += [empty(t, 2 * i, dtype=dtype), empty(t, i, dtype=dtype), empty(t, d, dtype=dtype)]
    return _float8_case(arguments, 0, t, dtype, max(d, i), True)
