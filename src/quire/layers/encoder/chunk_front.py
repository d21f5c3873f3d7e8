"""From the frames of sounds to the rows that an encoder's layers read: chunks of frames, each by itself through convolutions over
frames and bins, whose rows count from 0 in each chunk.

Legend: N sounds, B bins, F frames, K chunks, C channels, T rows of a chunk, D hidden.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from quire.layers.encoder.front_layers import Front
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.models.sound import Chunks

WIDTH = 3
"""Frames, and bins, that a convolution looks at."""


class ChunkFront(Front):
    """The convolutions, the matrix and their weights."""

    def __init__(self, chunks: Chunks, method: LinearMethod) -> None:
        super().__init__(method)
        self._chunks = chunks
        self._sines_TD = chunks.positions.table(chunks.hidden)

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Three convolutions, and the matrix behind them."""
        channels = RowBlock(self._chunks.channels, 1)
        for number, columns in enumerate((1, channels.rows, channels.rows), 1):
            yield builder.table(f"front{number}", (channels,), columns * WIDTH**2)
            yield builder.vector(f"front{number}_bias", channels)
        yield builder.linear("input", (builder.hidden,), self._chunks.columns)

    def __call__(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """The rows [K * T, D] of one sound (N is 1): whole chunks, or one that is shorter."""
        frames = min(self._chunks.frames, mel_NBF.shape[2])
        x_KCBF = mel_NBF[0].unflatten(1, (-1, frames)).transpose(0, 1)[:, None]
        for number in (1, 2, 3):
            kernel, bias = (self.tensors[f"front{number}{end}"] for end in ("", "_bias"))
            kernel = kernel.view(len(kernel), -1, WIDTH, WIDTH).to(x_KCBF.dtype)
            x_KCBF = functional.gelu(functional.conv2d(x_KCBF, kernel, bias.to(x_KCBF.dtype), stride=2, padding=1))
        out = self.multiply("input", x_KCBF.permute(0, 3, 1, 2).flatten(0, 1).flatten(1))
        sines_TD = self._sines_TD[: x_KCBF.shape[3]].to(out.device, out.dtype)
        return out + sines_TD.repeat(len(x_KCBF), 1)
