"""What encoders that read sound with layers of their own have in common: their weights, and a layer's order of halves.

Legend: T rows, D hidden, K columns of a matrix.
"""

import abc

import torch

from quire.kernels.types import LinearWeight
from quire.layers.assembly import Weight
from quire.layers.linear import LinearMethod
from quire.layers.tower import TowerPart
from quire.models.residual import Norm


class Front(TowerPart):
    """What makes the rows that an encoder's layers read."""

    @abc.abstractmethod
    def __call__(self, read: torch.Tensor) -> torch.Tensor:
        """The rows of sounds [N, B, F], or of images [N, C, H, W]."""


class FrontLayers(Front):
    """Conformers: attention and a convolution between two feed-forwards of which a share joins. A norm that the checkpoint does
    not have changes nothing.

    Args:
        method: multiplies its matrices.
        norm: of all its norms.
    """

    def __init__(self, method: LinearMethod, norm: Norm, act: str) -> None:
        super().__init__(method)
        self.norm, self.act = norm, act

    def set_weight(self, name: str, weight: Weight) -> None:
        if isinstance(weight, LinearWeight):
            weight.name = name
        super().set_weight(name, weight)

    @abc.abstractmethod
    def attend(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        """A layer's attention; `at` is before the names of its modules."""

    @abc.abstractmethod
    def convolve(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        """A layer's convolution."""

    def run_layer(self, at: str, x_TD: torch.Tensor, share: float) -> torch.Tensor:
        """The rows behind a layer."""
        x_TD = self._feed_forward(at + "ff1", x_TD, share)
        x_TD = x_TD + self._normed(at + "after_mixer", self.attend(at, self._normed(at + "before_mixer", x_TD)))
        x_TD = x_TD + self.convolve(at, self._normed(at + "before_conv", x_TD))
        return self._normed(at + "after_layer", self._feed_forward(at + "ff2", x_TD, share))

    def _feed_forward(self, at: str, x_TD: torch.Tensor, share: float) -> torch.Tensor:
        up = self.multiply(at + "_up", self._normed(at + "_before", x_TD), self.act)
        return x_TD + share * self._normed(at + "_after", self.multiply(at + "_down", up))

    def _normed(self, name: str, x_TD: torch.Tensor) -> torch.Tensor:
        return self.normed(self.norm, name, x_TD) if name in self.norms else x_TD
