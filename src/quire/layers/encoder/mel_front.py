"""From the frames of sounds to the rows that an encoder's layers read: two convolutions.

A convolution is a product with each row's neighbours side by side.
Legend: N sounds, F frames, T rows (F / 2), B bins, D hidden.
"""

import dataclasses
from collections.abc import Iterator

import torch

from quire.layers.encoder.front_layers import Front
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder
from quire.models.sound import Frames

WIDTH = 3
"""Frames that a convolution looks at."""


class MelFront(Front):
    """The convolutions and their weights."""

    def __init__(self, frames: Frames, method: LinearMethod) -> None:
        super().__init__(method)
        self._frames = frames

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Both matrices."""
        for name, columns in (("conv1", self._frames.bins), ("conv2", builder.spec.hidden)):
            linear = builder.linear(name, (builder.hidden,), columns * WIDTH, bias=True)
            yield dataclasses.replace(linear, dims=(columns, WIDTH))

    def __call__(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """The rows [N * T, D] of sounds of one length."""
        first_NDF = self._convolve("conv1", mel_NBF, 1)
        second_NDT = self._convolve("conv2", first_NDF, 2)
        return second_NDT.transpose(1, 2).flatten(0, 1)

    def _convolve(self, name: str, x_NCF: torch.Tensor, stride: int) -> torch.Tensor:
        padded = torch.nn.functional.pad(x_NCF, (1, 1))
        rows = padded.unfold(2, WIDTH, stride).transpose(1, 2)  # [N, T, C, WIDTH]
        flat = rows.reshape(rows.shape[0] * rows.shape[1], -1)
        return self.multiply(name, flat, self._frames.act).view(rows.shape[0], rows.shape[1], -1).transpose(1, 2)
