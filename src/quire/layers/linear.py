"""The door through which a linear layer's weight comes and is used: one method a number format.

A method knows which tensors a checkpoint holds for a matrix, how they become a `LinearWeight`, and which kernel multiplies it.
The layer that owns the weight knows none of it.
"""

import abc

import torch

from quire.kernels import ops
from quire.kernels.ops import LinearWeight


class LinearMethod(abc.ABC):
    """One format of linear weights."""

    name: str

    suffixes: tuple[str, ...]
    """What a checkpoint holds for a matrix besides its bias, e.g. ("weight", "weight_scale")."""

    @abc.abstractmethod
    def create(self, tensors: dict[str, torch.Tensor], bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        """Prepare a weight from this rank's tensors by suffix. The tensors may be dropped or kept."""

    @abc.abstractmethod
    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        """out = x @ weight.T + bias."""

    @abc.abstractmethod
    def weight_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """Device memory of one weight."""


class UnquantizedLinear(LinearMethod):
    """Matrices in the model's own type."""

    name = "unquantized"
    suffixes = ("weight",)

    def create(self, tensors: dict[str, torch.Tensor], bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        return ops.pack_linear(tensors["weight"].to(dtype), bias_N)

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        ops.linear(x_TK, weight, out_TN)

    def weight_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * in_features * dtype.itemsize
