"""Images and sounds that are given as the embeddings that an encoder would make of them.

Knows arrays, and what a client writes in their place. Knows no model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.guards import is_mapping, is_sequence
from quire.media import IMAGE, MADE_BEFORE
from quire.multimodal.content import PARAM
from quire.multimodal.prompt_embeds import decode_embeds, read_embeds

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
                f"{where}: {modality} embeddings are off: start the engine with enable_mm_embeds", param=PARAM
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
        raise RequestError(f"{where}: {GRID} must be three numbers: frames, rows and columns of patches", param=PARAM)
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
