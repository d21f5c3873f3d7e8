"""Files that `multi_modal_data` names by their paths: for programs that run the engine themselves, never for a server's clients.

Knows files. Knows no model and no message.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from quire.config import limits
from quire.errors import RequestError
from quire.guards import is_mapping
from quire.media import AUDIO, IMAGE
from quire.multimodal.audio import as_sounds
from quire.multimodal.audio_files import SampleBudget, open_audio
from quire.multimodal.content import PARAM, as_list
from quire.multimodal.image_files import PixelBudget, decode_image
from quire.multimodal.web_fetch import MediaError

_LISTS: Mapping[str, Callable[[Any], list[Any]]] = {IMAGE: as_list, AUDIO: as_sounds}


def open_named(data: Any) -> Any:
    """A prompt's media, with images and sounds in the place of paths (text or `pathlib.Path`).
    Raises RequestError: a file cannot be read."""
    if not is_mapping(data):
        return data
    opened = dict(cast("Mapping[str, Any]", data))
    for modality, listed in _LISTS.items():
        items = listed(opened.get(modality))
        if any(isinstance(item, str | os.PathLike) for item in items):
            decode = _decoder(modality)
            opened[modality] = [
                _open(item, f"{modality} {number}", decode) if isinstance(item, str | os.PathLike) else item
                for number, item in enumerate(items)
            ]
    return opened


def _decoder(modality: str) -> Callable[[bytes], Any]:
    """What makes an item of a file's bytes; those of one prompt share a bound."""
    pixels, samples = PixelBudget(), SampleBudget()
    return (lambda data: decode_image(data, pixels)) if modality == IMAGE else (lambda data: open_audio(data, samples))


def _open(path: str | os.PathLike[str], where: str, decode: Callable[[bytes], Any]) -> Any:
    try:
        with Path(path).open("rb") as file:
            content = file.read(limits.MAX_MEDIA_BYTES + 1)
        if len(content) > limits.MAX_MEDIA_BYTES:
            raise MediaError(f"it has more than {limits.MAX_MEDIA_BYTES} bytes")
        return decode(content)
    except (OSError, ValueError) as error:  # MediaError is a ValueError, as is what a path with a zero byte raises
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{where} of the prompt: {str(path)[:200]!r} cannot be read: {reason}"
        raise RequestError(message, param=PARAM) from None
