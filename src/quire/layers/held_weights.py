"""The weights of one part of a model, by the names of its modules.

Knows kinds of weights. Knows no part.
Legend: T tokens, D hidden.
"""

from typing import cast

import torch

from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers.assembly import NormWeight, Weight
from quire.models.residual import LayerNorm, Norm


class HeldWeights:
    """What is filled when weights are loaded: matrices, norms and bare tensors."""

    def __init__(self) -> None:
        self.linears: dict[str, LinearWeight] = {}
        self.norms: dict[str, NormWeight] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        if isinstance(weight, LinearWeight):
            self.linears[name] = weight
        elif isinstance(weight, torch.Tensor):
            self.tensors[name] = weight
        else:
            self.norms[name] = cast(NormWeight, weight)


def apply_norm(
    norm: Norm, weight: NormWeight, x_TD: torch.Tensor, out_TD: torch.Tensor, residual_TD: torch.Tensor | None = None
) -> None:
    """out = norm(x); with a residual, x joins it first and out = norm(residual)."""
    if isinstance(norm, LayerNorm):
        ops.layer_norm(x_TD, weight.weight, weight.bias, norm.eps, out_TD, residual_TD)
    else:
        ops.rms_norm(x_TD, weight.weight, norm.eps, out_TD, residual_TD)
