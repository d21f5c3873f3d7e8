"""Drawn cases of what is done to rows: products with plain matrices, norms, activations, gates, limits. Legend as in `case.py`;
D hidden, I intermediate."""

from typing import Any

import torch

from quire.conformance.cases.case import Case, Shapes, columns, draw, empty, normal, weight_of
from quire.kernels.recurrent import GATES
from quire.kernels.types import HeadWeight


@draw("linear")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k = rng.rows(), rng.width() + rng.choice((0, 8)), rng.width()
    out = rng.choice((dtype, torch.float32))
    weight = weight_of(n, k, dtype, rng.chance(0.5))
    return Case([normal(t, k, dtype=dtype), weight, empty(t, n, dtype=out)], (2,), dtype)


def norm_of(rng: Shapes, t: int, k: int, dtype: torch.dtype) -> list[Any]:
    """Rows, a norm's weight, epsilon."""
    return [normal(t, k, dtype=dtype, scale=rng.choice((1.0, 3.0))), torch.rand(k) + 0.5, 1e-6]


@draw("norm_linear")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k = rng.rows(), rng.width(), rng.width()
    arguments = [*norm_of(rng, t, k, dtype), weight_of(n, k, dtype, rng.chance(0.3))]
    return Case([*arguments, empty(t, n, dtype=dtype), empty(t, k, dtype=dtype)], (4,), dtype)


@draw("norm_linear_gated")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, i, k = rng.rows(), rng.width(), rng.width()
    kind = rng.choice(("silu", "gelu_tanh", "gelu"))
    arguments = [*norm_of(rng, t, k, dtype), weight_of(2 * i, k, dtype, False), kind]
    scratch = [empty(t, k, dtype=dtype), empty(t, 2 * i, dtype=dtype)]
    return Case([*arguments, empty(t, i, dtype=dtype), *scratch], (5,), dtype)


@draw("linear_add")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k = rng.rows(), rng.width(), rng.width()
    weight = weight_of(n, k, dtype, rng.chance(0.3))
    return Case([normal(t, k, dtype=dtype), weight, normal(t, n, dtype=dtype)], (2,), dtype)


@draw("head_linear")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n = rng.rows(), rng.of((1, 5, 16, 128), (1, 3))
    m, k = rng.of(((512, 128), (128, 512), (70, 24)), ((70, 24), (24, 70)))
    weight = HeadWeight(n, m, k, dtype, normal(n, m, k, dtype=dtype, scale=k**-0.5))
    return Case([normal(t, n, k, dtype=dtype), weight, empty(t, n, m, dtype=dtype)], (2,), dtype)


def _ids(t: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (t,), dtype=torch.int32)


@draw("embedding")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, v, d = rng.rows(), 999, rng.width()
    weight = weight_of(v, d, dtype, False)
    return Case([_ids(t, v), weight, empty(t, d, dtype=dtype), rng.choice((1.0, 3.5))], (2,), dtype)


@draw("add_embedding")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, v, d = rng.rows(), 999, rng.width()
    return Case([_ids(t, v), weight_of(v, d, dtype, False), normal(t, d, dtype=dtype)], (2,), dtype)


@draw("gather_rows")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, d, s = rng.rows(), rng.width(), rng.choice((1, 5, 40))
    return Case([normal(t, d, dtype=dtype), _ids(s, t), empty(s, d, dtype=dtype)], (2,), dtype)


@draw("rms_norm")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, d = rng.rows(), rng.width()
    residual = normal(t, d, dtype=dtype) if rng.chance(0.5) else None
    arguments = [normal(t, d, dtype=dtype), torch.rand(d) + 0.5, 1e-5, empty(t, d, dtype=dtype), residual]
    return Case(arguments, (3, 4) if residual is not None else (3,), dtype)


@draw("layer_norm")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, d = rng.rows(), rng.width()
    bias = normal(d) if rng.chance(0.5) else None
    arguments = [normal(t, d, dtype=dtype), torch.rand(d) + 0.5, bias, 1e-5, empty(t, d, dtype=dtype), None]
    return Case(arguments, (4,), dtype)


@draw("head_norm")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, groups, size = rng.rows(), rng.choice((1, 3, 8)), rng.of((7, 64, 128, 1100), (7, 64))
    (x,) = columns(rng, t, groups * size, dtype=dtype, scale=2.0)
    bias = normal(groups, size) if rng.chance(0.5) else None
    return Case([x, normal(groups, size), bias, 1e-5, rng.chance(0.5)], (0,), dtype)


@draw("add")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, d = rng.rows(), rng.width()
    return Case([normal(t, d, dtype=dtype), normal(t, d, dtype=dtype), rng.choice((1.0, 0.3))], (1,), dtype)


@draw("gated_activation")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, i = rng.rows(), rng.width()
    kind = rng.choice(("silu", "gelu", "gelu_tanh", "relu"))
    return Case([normal(t, 2 * i, dtype=dtype), kind, empty(t, i, dtype=dtype)], (2,), dtype)


@draw("activation")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    kind = rng.choice(("silu", "gelu", "gelu_tanh", "relu", "relu2"))
    return Case([normal(rng.rows(), rng.width(), dtype=dtype), kind], (0,), dtype)


@draw("xielu")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    x = normal(rng.rows(), rng.width(), dtype=dtype, scale=2.0)
    return Case([x, torch.tensor([0.7, 1.3])], (0,), dtype)


@draw("sigmoid_gate")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, width = rng.rows(), rng.width()
    (gate,) = columns(rng, t, rng.choice((1, width)), dtype=dtype)
    return Case([normal(t, width, dtype=dtype), gate], (0,), dtype)


@draw("gate")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, width = rng.rows(), rng.width()
    x, gate = columns(rng, t, width, width, dtype=dtype)
    return Case([x, gate, rng.choice(GATES), empty(t, width, dtype=dtype)], (3,), dtype)


@draw("gated_norm")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, group, groups = rng.rows(), rng.of((5, 64, 128, 4096), (5, 64)), rng.choice((1, 4))
    x, gate = columns(rng, t, group * groups, group * groups, dtype=dtype)
    gates, norm = gate if rng.chance(0.7) else None, torch.rand(group * groups) + 0.5
    return Case([x, gates, norm, 1e-5, group, rng.chance(0.5), empty(*x.shape, dtype=dtype)], (6,), dtype)


@draw("scale_columns")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, width = rng.rows(), rng.width()
    (x,), (out,) = columns(rng, t, width, dtype=dtype), columns(rng, t, width, dtype=dtype)
    return Case([x, normal(width) if rng.chance(0.7) else None, out], (2,), dtype)


@draw("scale_rows")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t = rng.rows()
    (x,) = columns(rng, t, rng.width(), dtype=dtype)
    return Case([x, normal(20), _ids(t, 20)], (0,), dtype)


@draw("clip")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    (x,) = columns(rng, rng.rows(), rng.width(), dtype=dtype)
    return Case([x, rng.choice((0.8, 3.0))], (0,), dtype)


@draw("scale_and_cap")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = normal(rng.rows(), 3000, scale=9.0)
    return Case([logits, rng.choice((1.0, 0.25)), rng.choice((0.0, 30.0))], (0,), torch.float32)
