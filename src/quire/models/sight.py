"""What encoders of images read, and what makes embeddings of their output, as data.

Knows shapes and names of modules. Knows nothing of tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from quire.models.residual import Norm


@dataclasses.dataclass(frozen=True)
class Patches:
    """What an encoder of images reads in the place of tokens: squares of pixels, each multiplied by one matrix.

    Attributes:
        size: pixels of a side. channels: numbers a pixel. frames: images that one patch spans.
        bias: of the matrix.
        class_token: a learned vector stands before the patches of each image.
        channels_last: of a pixel's numbers in the matrix's columns.
        class_last: the class token has the last of the learned positions, not the first.
        keeps_class: the class token's row is an embedding, too: the first one.
        merge: patches of merge x merge become one embedding; they come in such blocks, if the processor has cut them.
        is_cut: the processor has cut the patches; without it, it gives whole images.
        window: patches of a side of the windows within which the layers in `windowed` look.
        stretch: the learned positions are a square grid that is stretched over the image: `corners` on corners with two by two
            neighbours for each patch, or whole cells with two by two (`linear`) or four by four (`cubic`), or the one in which
            it begins (`cells`). Or they are two tables, of columns and of rows, whose entries are added: one after the other
            (`apart`), or in turn (`turns`).
        fills: an image's grid tells of the patches that are seen; others fill its last blocks, which see and are not seen.
        norms_first: the embedding's norm comes before positions.
        norm: of a patch's numbers, before the matrix.
        embeds_class, embeds_all: an image has one embedding, made of its class token or of all its rows.
    """

    size: int
    channels: int = 3
    frames: int = 1
    bias: bool = False
    class_token: bool = False
    merge: int = 1
    is_cut: bool = False
    window: int = 0
    windowed: tuple[int, ...] = ()
    stretch: Literal["", "corners", "linear", "cubic", "cells", "apart", "turns"] = ""
    norms_first: bool = False
    embeds_class: bool = False
    embeds_all: bool = False
    class_last: bool = False
    keeps_class: bool = False
    channels_last: bool = False
    fills: bool = False
    norm: Norm | None = None

    @property
    def values(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.size**2


@dataclasses.dataclass(frozen=True)
class Modules:
    """An encoder whose modules are Transformers' own, in the place of layers.

    Attributes:
        model: Transformers' class that has them. A weight's name there is that in the checkpoint, behind the trunk's prefix
            and what is `within` it.
        section: of config.json, that the class is made from; empty: all of it, and its `language_model` is left out.
        call: its method that reads images, or sounds as frames, under the name `reads`, and gives rows. `others`: what else
            it must be called with, and is None.
    """

    model: str
    section: str = ""
    call: str = "forward"
    reads: str = "pixel_values"
    others: tuple[str, ...] = ()
    within: str = ""


@dataclasses.dataclass(frozen=True)
class Group:
    """So many rows become one: side by side (`by_column`: all values of one column, then those of the next), or their mean."""

    count: int
    is_mean: bool = False
    by_column: bool = False


@dataclasses.dataclass(frozen=True)
class Normed:
    """A norm of rows, and what follows it; `name` is the module's."""

    name: str
    norm: Norm
    act: str = ""


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix with `outputs` rows, and what follows it; a checkpoint may have it in so many `parts`."""

    name: str
    outputs: int
    bias: bool = True
    act: str = ""
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Gated:
    """The second half of a row's columns, through an activation, multiplies the first half; the other way round with
    `gate_first`."""

    act: str
    gate_first: bool = False


@dataclasses.dataclass(frozen=True)
class Standard:
    """Rows times a factor; with `learned` less a vector, and times another (the modules `standard_bias` and `standard_scale`)."""

    factor: float
    learned: bool


@dataclasses.dataclass(frozen=True)
class Probe:
    """One learned vector (`probe`) attends all `count` rows of an image, through `probe_in` and `probe_out`; then a feed-forward
    behind a norm (`probe_norm`, `probe_up`, `probe_down`) joins what it gave."""

    count: int
    heads: int
    intermediate: int
    act: str
    norm: Norm


@dataclasses.dataclass(frozen=True)
class Queries:
    """So many learned vectors read each group of `count` rows, and take its place (the modules `queries…`).

    Attributes:
        every: of how many layers one has attention to the rows, besides that among the vectors.
    """

    count: int
    queries: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    act: str
    norm: Norm
    every: int = 1

    def attentions(self, layer: int, columns: int) -> list[tuple[str, int]]:
        """Those of a layer, with the columns of what they read."""
        return [("self", self.hidden), *([("rows", columns)] if layer % self.every == 0 else [])]


@dataclasses.dataclass(frozen=True)
class Pooled:
    """The mean of a few rows attends them, through `pool_q`, `pool_kv` and `pool_out` (which have biases, or none).

    Attributes:
        outputs: columns of what it gives.
    """

    heads: int
    kv_heads: int
    head_dim: int
    outputs: int
    bias: bool


Stage: TypeAlias = Group | Normed | Product | Gated | Standard | Probe | Queries
