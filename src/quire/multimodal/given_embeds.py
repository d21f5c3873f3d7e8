"""Embeddings in the place of a prompt's tokens (`prompt_embeds`): what users and clients give, as items that steps lay in place;
and those that an encoder would make of an image or a sound.

A prompt of embeddings is cut into pieces, each known by its content: prompts that begin alike share the pages of their first
pieces, and a step holds only the pieces that it computes. Knows arrays and bytes; knows no torch and unpickles nothing.
"""

import base64
import binascii
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.guards import is_mapping, is_sequence
from quire.media import EMBEDS, IMAGE, MADE_BEFORE, MediaItem, MediaTensor
from quire.multimodal.content import PARAM as MEDIA

PARAM = "prompt_embeds"
PIECE = 256
"""Tokens of a piece."""
PLACEHOLDER = 0
"""The token id that stands in the prompt for an embedding."""
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Safetensors' names of the types that can be read; NumPy has no bfloat16."""


def read_embeds(given: Any, name: str = PARAM) -> npt.NDArray[Any]:
    """[tokens, columns] of a tensor or an array; `name` is the field's.
    Raises RequestError: it is none, has other dimensions, or is not finite."""
    try:
        plain = given.detach().float().cpu().numpy() if hasattr(given, "detach") else np.asarray(given, np.float32)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name} is no tensor of numbers: {error}", param=name) from error
    return _checked(plain, name)


def _checked(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    if array.ndim == 3 and array.shape[0] == 1:  # a batch of one
        array = array[0]
    if array.ndim != 2 or 0 in array.shape:
        shape = list(array.shape)
        raise RequestError(f"{name} has shape {shape}; it must be [tokens, hidden size of the model]", param=name)
    if not np.isfinite(array).all():
        raise RequestError(f"{name} has numbers that are not finite", param=name)
    return array


def decode_embeds(text: str, name: str = PARAM) -> npt.NDArray[Any]:
    """[tokens, columns] of a client's text: base64 of a safetensors file with one tensor; `name` is the field's.
    Raises RequestError: it is something else; what torch.save writes is refused, as it is a pickle."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name} must be base64 of a safetensors file", param=name) from error
    if data.startswith(b"PK\x03\x04"):
        message = (
            f"{name} is what torch.save writes, a pickle, which is never read: send safetensors.torch.save({{...}})"
        )
        raise RequestError(message, param=name)
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        ((_, entry),) = [pair for pair in header.items() if pair[0] != "__metadata__"]
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + length :][begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        types = ", ".join(_DTYPES)
        message = (
            f"{name} must be base64 of a safetensors file with one tensor of type {types} ({type(error).__name__})"
        )
        raise RequestError(message, param=name) from error
    if entry["dtype"] == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return _checked(values, name)


def embeds_items(array_TD: npt.NDArray[Any]) -> list[MediaItem]:
    """The items of a prompt that consists of these embeddings."""
    items: list[MediaItem] = []
    for offset in range(0, len(array_TD), PIECE):
        piece = MediaTensor.from_array(array_TD[offset : offset + PIECE])
        count = piece.shape[0]
        key = hashlib.blake2b(piece.data, digest_size=16, person=b"embeds", salt=piece.dtype.encode()).hexdigest()
        items.append(MediaItem(f"embeds:{key}", EMBEDS, offset, count, PLACEHOLDER, count, [], {EMBEDS: piece}))
    return items


GRID = "image_grid_thw"


@dataclasses.dataclass(frozen=True)
class GivenEmbeds:
    """An item's embeddings [E, D], and its grid of patches (frames, rows, columns) where it is given."""

    array_ED: npt.NDArray[Any]
    grid: tuple[int, ...] = ()

    @classmethod
    def read(cls, given: Any, modality: str, where: str, *, is_on: bool) -> Self | None:
        """What the user gives for an item, if it is embeddings: a dict with `image_embeds` and `image_grid_thw`, or with
        `audio_embeds`; or numbers of two dimensions (of sounds in a tensor, where they are on: an array has channels). None:
        it is something else.
        Raises RequestError: they are off, or cannot be read."""
        name = MADE_BEFORE[modality]
        is_dict = is_mapping(given) and name in given
        is_array = _is_floats(given) and (modality == IMAGE or (is_on and hasattr(given, "detach")))
        if not is_dict and not is_array:
            return None
        if not is_on:
            raise RequestError(
                f"{where}: {modality} embeddings are off: start the engine with enable_mm_embeds", param=MEDIA
            )
        if is_dict:
            array_ED = read_embeds(given[name], f"{where}: {name}")
            return cls(np.ascontiguousarray(array_ED), _read_grid(given.get(GRID), where))
        return cls(np.ascontiguousarray(read_embeds(given, where)))


def _is_floats(given: Any) -> bool:
    return getattr(given, "ndim", 0) == 2 and "float" in str(getattr(given, "dtype", ""))


def _read_grid(given: Any, where: str) -> tuple[int, ...]:
    if given is None:
        return ()
    try:
        grid = tuple(int(number) for number in np.asarray(given).reshape(-1))
    except (TypeError, ValueError):
        grid = ()
    if len(grid) != 3 or min(grid) < 1:
        raise RequestError(f"{where}: {GRID} must be three numbers: frames, rows and columns of patches", param=MEDIA)
    return grid


def decode_item_embeds(given: Any, name: str, field: str) -> dict[str, Any]:
    """What a client writes: base64 of a safetensors file, or an object of it (under the part's `name`) and of the grid
    (`image_grid_thw`). Raises RequestError: it is something else; `field` is its name."""
    text, grid = (given.get(name), given.get(GRID)) if is_mapping(given) else (given, None)
    if not isinstance(text, str) or not (grid is None or _is_numbers(grid)):
        wanted = f"base64 of a safetensors file, or an object with it as {name}, and {GRID}, three numbers"
        raise RequestError(f"{field}: expected {wanted}.", param=field)
    return {name: decode_embeds(text, field), GRID: grid}


def _is_numbers(given: Any) -> bool:
    numbers: Sequence[Any] = given if is_sequence(given) else ()
    return len(numbers) == 3 and all(type(number) is int and 0 < number < 1 << 31 for number in numbers)
