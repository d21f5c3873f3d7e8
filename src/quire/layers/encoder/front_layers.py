"""What encoders that read sound with layers of their own have in common: their weights, and a layer's order of halves.

Legend: T rows, D hidden, K columns of a matrix.
"""

import abc
from collections.abc import Iterator
from typing import cast

import torch

from quire.kernels.norm import ACTIVATIONS
from quire.kernels.types import LinearWeight
from quire.layers.activation import kernel_activation
from quire.layers.assembly import NormWeight, Weight
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder
from quire.layers.operations import apply_norm
from quire.models.residual import Norm


class FrontLayers(abc.ABC):
    """Conformers: attention and a convolution between two feed-forwards of which a share joins. A norm that the checkpoint does
    not have changes nothing.

    Args:
        method: multiplies its matrices.
        norm: of all its norms.
    """

    def __init__(self, method: LinearMethod, norm: Norm, act: str) -> None:
        self.method, self.norm, self.activate = method, norm, ACTIVATIONS[kernel_activation(act)]
        self.weights: dict[str, Weight] = {}

    @abc.abstractmethod
    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """All of its weights."""

    @abc.abstractmethod
    def __call__(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """The rows of one sound (N is 1)."""

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        if isinstance(weight, LinearWeight):
            weight.name = name
        self.weights[name] = weight

    @abc.abstractmethod
    def attend(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        """A layer's attention; `at` is before the names of its modules."""

    @abc.abstractmethod
    def convolve(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        """A layer's convolution."""

    def run_layer(self, at: str, x_TD: torch.Tensor, share: float) -> torch.Tensor:
        """The rows behind a layer."""
        x_TD = self._feed_forward(at + "ff1", x_TD, share)
        x_TD = x_TD + self.normed(at + "after_mixer", self.attend(at, self.normed(at + "before_mixer", x_TD)))
        x_TD = x_TD + self.convolve(at, self.normed(at + "before_conv", x_TD))
        return self.normed(at + "after_layer", self._feed_forward(at + "ff2", x_TD, share))

    def _feed_forward(self, at: str, x_TD: torch.Tensor, share: float) -> torch.Tensor:
        up = self.activate(self.multiply(at + "_up", self.normed(at + "_before", x_TD)).float()).to(x_TD.dtype)
        return x_TD + share * self.normed(at + "_after", self.multiply(at + "_down", up))

    def tensor(self, name: str) -> torch.Tensor:
        """A weight that is neither a matrix nor a norm's."""
        return cast(torch.Tensor, self.weights[name])

    def normed(self, name: str, x_TD: torch.Tensor) -> torch.Tensor:
        """Rows behind a norm."""
        if name not in self.weights:
            return x_TD
        out = torch.empty_like(x_TD)
        apply_norm(self.norm, cast(NormWeight, self.weights[name]), x_TD.contiguous(), out)
        return out

    def multiply(self, name: str, x_TK: torch.Tensor) -> torch.Tensor:
        """Rows times a matrix."""
        weight = cast(LinearWeight, self.weights[name])
        out = x_TK.new_empty(len(x_TK), weight.out_features)
        self.method.apply(x_TK.contiguous(), weight, out)
        return out
