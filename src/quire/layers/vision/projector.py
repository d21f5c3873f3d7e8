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
from quire.models.spec import Group, Normed, Product, Stage


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
            elif isinstance(stage, Normed):
                yield builder.norm(stage.name, stage.norm, columns)
            else:
                yield builder.linear(stage.name, (RowBlock(stage.outputs, 1),), columns, bias=stage.bias)
                columns = stage.outputs

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        self._weights[name] = weight

    def __call__(self, rows_XC: torch.Tensor) -> torch.Tensor:
        """The embeddings of rows, in a tensor of their own."""
        x = rows_XC
        for stage in self._stages:
            if isinstance(stage, Group):
                x = (
                    x.reshape(-1, stage.count, x.shape[1]).mean(1)
                    if stage.is_mean
                    else x.reshape(-1, stage.count * x.shape[1])
                )
            elif isinstance(stage, Normed):
                out = torch.empty_like(x)
                apply_norm(stage.norm, cast(NormWeight, self._weights[stage.name]), x.contiguous(), out)
                x = out
            else:
                x = self._multiply(stage, x.contiguous())
        return x

    def _multiply(self, stage: Product, x_XC: torch.Tensor) -> torch.Tensor:
        out = x_XC.new_empty(len(x_XC), stage.outputs)
        ops.linear(x_XC, cast(LinearWeight, self._weights[stage.name]), out)
        return ACTIVATIONS[kernel_activation(stage.act)](out.float()).to(out.dtype) if stage.act else out
