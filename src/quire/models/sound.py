"""What encoders of sound are made of besides layers, as data.

Knows shapes and constants, as `spec.py` does.
"""

import dataclasses

from quire.models.rope import Sinusoids


@dataclasses.dataclass(frozen=True)
class Frames:
    """What an encoder of sound reads in the place of tokens: frames of `bins` numbers, through convolutions over three of them
    (the modules `conv1` and `conv2`), each with an activation behind it; the second one makes one row of two frames."""

    bins: int
    act: str = "gelu"


@dataclasses.dataclass(frozen=True)
class Chunks:
    """What an encoder of sound reads in the place of tokens: chunks of `frames` of `bins` numbers, each by itself through three
    convolutions of `channels` (the modules `front1` to `front3`), which halve both, and the matrix `input`.

    Attributes:
        positions: of the rows in a chunk. hidden: their columns.
    """

    bins: int
    frames: int
    channels: int
    hidden: int
    positions: Sinusoids

    @property
    def columns(self) -> int:
        """Of a row behind the convolutions."""
        return self.channels * -(-self.bins // 8)


@dataclasses.dataclass(frozen=True)
class Conformer:
    """Layers that read frames with attention and convolutions (https://arxiv.org/abs/2005.08100), behind two convolutions that
    make one row of four frames.

    Attributes:
        bins: numbers of a frame. channels: of the two convolutions in front.
        layers, hidden, heads: of its layers.
        kernel, window: rows that a layer's convolution and its attention see, the last of which is the row itself.
        start: what the distance of a row to itself counts as.
        soft_cap: of scores.
        share: of a feed-forward's output that joins.
        outputs: columns of what it gives.
    """

    bins: int
    channels: tuple[int, int]
    layers: int
    hidden: int
    heads: int
    kernel: int
    window: int
    start: int
    soft_cap: float
    share: float
    act: str
    eps: float
    outputs: int

    @property
    def front_columns(self) -> int:
        """Of a row behind the convolutions in front."""
        return -(-self.bins // 4) * self.channels[1]


@dataclasses.dataclass(frozen=True)
class BlockConformer:
    """The same, without convolutions in front, and rows that see one another within blocks of `block` rows.

    Attributes:
        columns: of what is read.
        wide: columns within a feed-forward. channels: of a layer's convolution. letters: that are guessed in the middle.
        farthest: distance that has a vector of its own.
    """

    columns: int
    layers: int
    hidden: int
    heads: int
    head_dim: int
    wide: int
    channels: int
    kernel: int
    block: int
    farthest: int
    letters: int
