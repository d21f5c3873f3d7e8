"""Media of a prompt as plain data: what a frontend makes of an image, and what travels to the core and to the workers.

Knows bytes, shapes and places in a prompt. Knows no image library, no processor and no model.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

ItemT = TypeVar("ItemT")
IMAGE = "image"
VIDEO = "video"
AUDIO = "audio"
MODALITIES = {IMAGE: "images", VIDEO: "videos", AUDIO: "sounds"}
"""Kinds of media that a prompt may have, and what several are called."""
EMBEDS = "embeds"
"""What stands in the place of an image where a prompt has embeddings instead of tokens: nothing has to be computed."""
IMAGE_EMBEDS = "image_embeds"
AUDIO_EMBEDS = "audio_embeds"
"""An image or a sound whose embeddings were made before; they are the item's tensor `EMBEDS`."""
MADE_BEFORE = {IMAGE: IMAGE_EMBEDS, AUDIO: AUDIO_EMBEDS}


SPAN = -2
"""The token of an item without embeddings, which says of a prompt or a part of it that its tokens see one another."""
BESIDE = -1
"""The token of an item that stands beside the whole prompt: a model's encoder reads it, and every token sees what it has read."""


class MediaTensor(msgspec.Struct, array_like=True, frozen=True):
    """An array of any shape: its bytes as they are in memory, never a pickle."""

    dtype: str
    shape: list[int]
    data: bytes

    @classmethod
    def from_array(cls, values: npt.NDArray[Any]) -> Self:
        """The array's copy."""
        return cls(values.dtype.name, list(values.shape), np.ascontiguousarray(values).tobytes())

    def to_array(self) -> npt.NDArray[Any]:
        """A read-only view of the bytes.
        Raises ValueError: they are not as many as type and shape say."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class MediaItem(msgspec.Struct, array_like=True, omit_defaults=True):
    """One image, sound or video of a prompt, or a frame of one, which stands there as `length` tokens from `offset` on.

    Attributes:
        key: of its content and of all that its embeddings depend on: items with one key have the same embeddings.
        token_id: those of its tokens that are this one take an embedding each, in order; the others are text.
        num_embeds: how many these are.
        sees: which of its tokens see one another, in layers that let them, and are therefore computed in one step: `runs` of
            embeddings, all of the `item`, or those of the `items` within it; empty: none sees those behind itself.
        modality: whose encoder reads it: that of images reads frames, too.
        grid: frames, rows and columns of its embeddings, where positions have several axes; else empty.
        interval: positions from one frame to the next.
        tensors: what the model's encoder reads, by name. Without them it is only a place in a prompt.
    """

    key: str
    modality: str
    offset: int
    length: int
    token_id: int
    num_embeds: int
    grid: list[int] = []
    tensors: dict[str, MediaTensor] = {}
    sees: str = ""
    interval: float = 1.0

    @property
    def is_beside(self) -> bool:
        """Whether it stands beside the prompt; then its place is the first token, and it is needed to the end."""
        return self.token_id == BESIDE

    @property
    def end(self) -> int:
        """The first position behind it."""
        return self.offset + self.length

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        return sum(len(tensor.data) for tensor in self.tensors.values())

    def without_tensors(self) -> "MediaItem":
        """The same, for those who need not compute it."""
        return msgspec.structs.replace(self, tensors={})


def in_batches(items: Iterable[ItemT], size: Callable[[ItemT], int], most: int) -> Iterator[list[ItemT]]:
    """Items in their order, as many at once as are not larger than `most` together; a larger one comes by itself."""
    batch, total = list[ItemT](), 0
    for item in items:
        own = size(item)
        if batch and total + own > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += own
    if batch:
        yield batch
