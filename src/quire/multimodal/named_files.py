"""Files that `multi_modal_data` names by their paths: for programs that run the engine themselves, never for a server's clients.

Knows files. Knows no model and no message.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config import limits
from quire.errors import RequestError
from quire.multimodal.content import PARAM, as_list
from quire.multimodal.image_files import PixelBudget, decode_image
from quire.multimodal.web_fetch import MediaError

_IMAGE = "image"


def open_named(data: Mapping[str, Any]) -> dict[str, Any]:
    """The media of a prompt, with images in the place of paths (text or `pathlib.Path`).
    Raises RequestError: a file cannot be read, or is no image."""
    opened = dict(data)
    images = as_list(data.get(_IMAGE))
    if any(isinstance(image, str | os.PathLike) for image in images):
        budget = PixelBudget()
        opened[_IMAGE] = [_open(image, number, budget) for number, image in enumerate(images)]
    return opened


def _open(given: Any, number: int, budget: PixelBudget) -> Any:
    if not isinstance(given, str | os.PathLike):
        return given
    try:
        with Path(given).open("rb") as file:
            content = file.read(limits.MAX_MEDIA_BYTES + 1)
        if len(content) > limits.MAX_MEDIA_BYTES:
            raise MediaError(f"it has more than {limits.MAX_MEDIA_BYTES} bytes")
        return decode_image(content, budget)
    except (OSError, ValueError, TypeError) as error:  # a MediaError is a ValueError; so is a path with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"image {number} of the prompt: {str(given)[:200]!r} cannot be read: {reason}"
        raise RequestError(message, param=PARAM) from None
