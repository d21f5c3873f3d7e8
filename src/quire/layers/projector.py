"""What makes embeddings of an encoder's rows: a few stages, computed one after another.

Knows shapes and weights. Knows nothing of images.
Legend: X rows, C columns.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from quire.kernels import ops
from quire.kernels.norm import ACTIVATIONS
from quire.kernels.types import LinearWeight
from quire.layers.activation import kernel_activation
from quire.layers.assembly import NormWeight, Weight
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.operations import apply_norm
from quire.layers.query_former import QueryFormer, query_modules
from quire.models.sight import Gated, Group, Normed, Probe, Product, Queries, Stage, Standard

STANDARD = ("standard_bias", "standard_scale")


class Projector:
    """Stages and their weights.

    Args:
        columns: of what it reads.
    """

    def __init__(self, stages: Sequence[Stage], columns: int) -> None:
        self._stages, self._columns = stages, columns
        self._weights: dict[str, Weight] = {}

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Its matrices and norms, in order."""
        columns = self._columns
        for stage in self._stages:
            if isinstance(stage, Group):
                columns *= 1 if stage.is_mean else stage.count
            elif isinstance(stage, Gated):
                columns //= 2
            elif isinstance(stage, Queries):
                yield from query_modules(stage, builder, columns)
                columns = stage.hidden
            elif isinstance(stage, Probe):
                yield from _probe_modules(stage, builder, columns)
            elif isinstance(stage, Normed):
                if stage.norm.weight:
                    yield builder.norm(stage.name, stage.norm, columns)
            elif isinstance(stage, Standard):
                if stage.learned:
                    yield from (builder.vector(name, RowBlock(columns, 1)) for name in STANDARD)
            else:
                parts = (RowBlock(stage.outputs // stage.parts, 1),) * stage.parts
                yield builder.linear(stage.name, parts, columns, bias=stage.bias)
                columns = stage.outputs

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        self._weights[name] = weight

    def __call__(self, rows_XC: torch.Tensor) -> torch.Tensor:
        """The embeddings of rows, in a tensor of their own."""
        x = rows_XC
        for stage in self._stages:
            if isinstance(stage, Group):
                x = _grouped(stage, x)
            elif isinstance(stage, Gated):
                x = _gated(stage, x)
            elif isinstance(stage, Queries):
                x = QueryFormer(stage, self._weights, self._multiply).run(x)
            elif isinstance(stage, Probe):
                x = self._probe(stage, x)
            elif isinstance(stage, Normed):
                out, weight = torch.empty_like(x), self._weights.get(stage.name)
                weight = NormWeight(x.new_ones(x.shape[1], dtype=torch.float32)) if weight is None else weight
                apply_norm(stage.norm, cast(NormWeight, weight), x.contiguous(), out)
                x = _activated(stage.act, out)
            elif isinstance(stage, Standard):
                x = self._standardize(stage, x)
            else:
                x = self._multiply(stage, x.contiguous())
        return x

    def _probe(self, stage: Probe, x_XC: torch.Tensor) -> torch.Tensor:
        """One row for each image."""
        columns = x_XC.shape[1]
        probe, bias = (cast(torch.Tensor, self._weights[name]).to(x_XC.dtype) for name in ("probe", "probe_in_bias"))
        rows = torch.cat((x_XC, probe[None]))
        products = self._multiply(Product("probe_in", 3 * columns, bias=False), rows) + bias
        shape = (-1, stage.count, stage.heads, columns // stage.heads)
        k, v = (part.reshape(shape).transpose(1, 2).float() for part in products[:-1, columns:].split(columns, dim=1))
        q = products[-1, :columns].reshape(1, stage.heads, 1, -1).float().expand(len(k), -1, -1, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(1).to(x_XC.dtype)
        out = self._multiply(Product("probe_out", columns), attended)
        normed = torch.empty_like(out)
        apply_norm(stage.norm, cast(NormWeight, self._weights["probe_norm"]), out, normed)
        up = self._multiply(Product("probe_up", stage.intermediate, act=stage.act), normed)
        return out + self._multiply(Product("probe_down", columns), up)

    def _standardize(self, stage: Standard, x_XC: torch.Tensor) -> torch.Tensor:
        rows = x_XC.float() * stage.factor
        if stage.learned:
            bias, scale = (cast(torch.Tensor, self._weights[name]) for name in STANDARD)
            rows = (rows - bias) * scale
        return rows.to(x_XC.dtype)

    def _multiply(self, stage: Product, x_XC: torch.Tensor) -> torch.Tensor:
        out = x_XC.new_empty(len(x_XC), stage.outputs)
        ops.linear(x_XC, cast(LinearWeight, self._weights[stage.name]), out)
        return _activated(stage.act, out)


def _activated(act: str, x_XC: torch.Tensor) -> torch.Tensor:
    return ACTIVATIONS[kernel_activation(act)](x_XC.float()).to(x_XC.dtype) if act else x_XC


def _probe_modules(stage: Probe, builder: ModuleBuilder, columns: int) -> Iterator[Module]:
    whole = RowBlock(columns, 1)
    yield builder.vector("probe", whole)
    yield builder.linear("probe_in", (RowBlock(3 * columns, 1),), columns)
    yield builder.vector("probe_in_bias", RowBlock(3 * columns, 1))
    yield builder.linear("probe_out", (whole,), columns, bias=True)
    yield builder.norm("probe_norm", stage.norm, columns)
    yield builder.linear("probe_up", (RowBlock(stage.intermediate, 1),), columns, bias=True)
    yield builder.linear("probe_down", (whole,), stage.intermediate, bias=True)


def _grouped(group: Group, x_XC: torch.Tensor) -> torch.Tensor:
    parts_YGC = x_XC.reshape(-1, group.count, x_XC.shape[1])
    if group.is_mean:
        return parts_YGC.mean(1)
    return (parts_YGC.transpose(1, 2) if group.by_column else parts_YGC).flatten(1)


def _gated(stage: Gated, x_XC: torch.Tensor) -> torch.Tensor:
    first, second = x_XC.float().chunk(2, dim=1)
    up, gate = (second, first) if stage.gate_first else (first, second)
    return (ACTIVATIONS[kernel_activation(stage.act)](gate) * up).to(x_XC.dtype)
