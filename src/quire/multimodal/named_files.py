"""Files that `multi_modal_data` names by their paths: for programs that run the engine themselves, never for a server's clients.

Knows files. Knows no model and no message.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from quire.config import MultiModalConfig
from quire.config.multimodal import VideoReading
from quire.errors import RequestError
from quire.guards import is_mapping
from quire.media import AUDIO, IMAGE, VIDEO
from quire.multimodal.audio import as_sounds
from quire.multimodal.content import PARAM, as_list
from quire.multimodal.image_files import most_bytes
from quire.multimodal.media_source import decoders
from quire.multimodal.video import as_videos
from quire.multimodal.video_files import reading_of
from quire.multimodal.web_fetch import MediaError

_LISTS: Mapping[str, Callable[[Any], list[Any]]] = {IMAGE: as_list, VIDEO: as_videos, AUDIO: as_sounds}


OpenMedia = Callable[..., Any]
"""Gives a prompt's media, with what files hold in the place of their paths; it may be told the prompt's `media_io_kwargs`."""


def opener(settings: MultiModalConfig | None) -> OpenMedia:
    """Opens files that a prompt names."""
    usual = VideoReading() if settings is None else settings.video_reading
    return lambda data, io=None: open_named(data, reading_of(usual, io))


def as_given(data: Any, io: Any = None) -> Any:
    """Opens no file."""
    return data


def open_named(data: Any, reading: VideoReading | None = None) -> Any:
    """A prompt's media, with images, videos and sounds in the place of paths (text or `pathlib.Path`).
    Raises RequestError: a file cannot be read."""
    if not is_mapping(data):
        return data
    opened = dict(cast("Mapping[str, Any]", data))
    for modality, listed in _LISTS.items():
        items = listed(opened.get(modality))
        if any(isinstance(item, str | os.PathLike) for item in items):
            decode, most = decoders(reading or VideoReading())[modality], most_bytes(modality)
            opened[modality] = [
                _open(item, f"{modality} {number}", decode, most) if isinstance(item, str | os.PathLike) else item
                for number, item in enumerate(items)
            ]
    return opened


def _open(path: str | os.PathLike[str], where: str, decode: Callable[[bytes], Any], most: int) -> Any:
    try:
        with Path(path).open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise MediaError(f"it has more than {most} bytes")
        return decode(content)
    except (OSError, ValueError) as error:  # MediaError is a ValueError, as is what a path with a zero byte raises
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{where} of the prompt: {str(path)[:200]!r} cannot be read: {reason}"
        raise RequestError(message, param=PARAM) from None
