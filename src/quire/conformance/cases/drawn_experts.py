"""Drawn cases of mixtures of experts. Legend as in `kernels/experts.py`."""

from typing import Any

import torch

from quire.conformance.cases.case import Case, ExpertMatrices, Shapes, draw, empty, normal
from quire.conformance.cases.drawn_codes import codes_of
from quire.kernels.packed import dequantize
from quire.kernels.types import ClampedSwiglu, ExpertScratch, ExpertWeights, LinearWeight, Routing


def _scratch(t: int, e: int, k: int, d: int, i: int, dtype: torch.dtype) -> ExpertScratch:
    return ExpertScratch(
        capacity=t, num_experts=e, top_k=k, hidden=d, intermediate=i, dtype=dtype, device=torch.device("cpu")
    )


def _experts(e: int, d: int, i: int, dtype: torch.dtype) -> ExpertWeights:
    gate_up, down = normal(e, 2 * i, d, dtype=dtype, scale=d**-0.5), normal(e, d, i, dtype=dtype, scale=i**-0.5)
    return ExpertWeights(gate_up, down)


def _choices(t: int, e: int, k: int) -> list[torch.Tensor]:
    """Experts of each token and their weights."""
    return [torch.stack([torch.randperm(e)[:k] for _ in range(t)]).int(), torch.rand(t, k)]


@draw("moe_route")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, routing = rng.rows(), Routing(rng.choice((8, 64, 128)), rng.choice((2, 8)), renormalize=rng.chance(0.5))
    out = [torch.zeros(t, routing.top_k, dtype=torch.int32), empty(t, routing.top_k, dtype=torch.float32)]
    return Case([normal(t, routing.num_experts), routing, torch.tensor([t]), *out, None], (3, 4), torch.float32)


@draw("moe_experts")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, e, k, d, i = (
        rng.rows(),
        rng.of((16,), (6,)),
        rng.of((4,), (2,)),
        rng.of((64, 256), (64,)),
        rng.of((48, 128), (48,)),
    )
    x, out, count = normal(t, d, dtype=dtype), empty(t, d, dtype=dtype), torch.tensor([t])
    arguments = [x, *_choices(t, e, k), _experts(e, d, i, dtype), "silu", count, out, _scratch(t, e, k, d, i, dtype)]
    return Case(arguments, (6,), dtype)


KINDS = (
    *(("int4 zeros", 32, "half"), ("int8", 32, "any"), ("table", 32, "any")),
    *(("e2m1", 32, "power"), ("e2m1", 16, "any")),
)
"""Codes, columns of a group, what scales are; the last two are mxfp4 and nvfp4."""


@draw("moe_experts, codes")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    t, e, k, is_gated = rng.rows(), rng.of((16,), (5,)), rng.of((4,), (2,)), rng.chance(0.7)
    (kind, group, scales), d, i = rng.choice(KINDS), rng.of((64, 96, 256, 480), (64,)), rng.of((96, 128, 288), (96,))
    matrices = [
        [codes_of(rng, kind, *shape, group, dtype, scales, may_permute=False) for _ in range(e)]
        for shape in ((2 * i if is_gated else i, d), (d, i))
    ]
    more: dict[str, Any] = {"clamp": ClampedSwiglu(1.702, 7.0)} if is_gated and rng.chance(0.5) else {}
    if rng.chance(0.5):
        more |= {"gate_up_bias_E2I": normal(e, matrices[0][0].out_features), "down_bias_ED": normal(e, d)}
    gate_up, down = (torch.stack([dequantize(weight) for weight in each]) for each in matrices)
    values = ExpertWeights(gate_up, down, **more)
    experts = ExpertMatrices(matrices[0], matrices[1], more, is_gated)
    x, out, name = normal(t, d, dtype=dtype), empty(t, d, dtype=dtype), "silu" if is_gated else "relu2"
    before, behind = [x, *_choices(t, e, k)], [name, torch.tensor([t]), out, _scratch(t, e, k, d, i, dtype)]
    return Case([*before, experts, *behind], (6,), dtype, plain=[*before, values, *behind])


@draw("norm_moe")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    """Routers whose logits lie so far apart that rounding chooses no other expert."""
    t, e, k, d, i = (
        rng.rows(),
        rng.of((8, 16), (8,)),
        rng.of((2, 4), (2,)),
        rng.of((64, 256), (64,)),
        rng.of((48, 128), (48,)),
    )
    directions_ED = torch.linalg.qr(normal(d, e)).Q.T.contiguous()
    levels_TE = torch.stack([torch.linspace(-2, 2, e)[torch.randperm(e)] for _ in range(t)])
    x, norm = levels_TE @ directions_ED + normal(t, d, scale=0.1), torch.rand(d) + 0.5
    router = LinearWeight(e, d, dtype, (directions_ED / norm).to(dtype))
    routing = Routing(
        e,
        k,
        scoring=rng.choice(("softmax", "softmax", "sigmoid")),
        renormalize=rng.chance(0.5),
        scale=rng.choice((1.0, 2.5)),
    )
    experts, room = _experts(e, d, i, dtype), _scratch(t, e, k, d, i, dtype)
    count, normed = torch.tensor([t]), empty(t, d, dtype=dtype)
    arguments = [x.to(dtype), norm, 1e-6, router, routing, experts, "silu", count, normed, room]
    return Case(arguments, (0,), dtype)
