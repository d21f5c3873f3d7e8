"""Image files of clients, as pixels. What a file claims is checked before it is decoded.

Knows files of images and their dangers. Knows no place they come from.
"""

import base64
import binascii
import functools
import io
from typing import Any

from quire.config import limits
from quire.errors import RequestError
from quire.multimodal.budget import Budget
from quire.multimodal.content import Pixels, read_image, require_library
from quire.multimodal.web_fetch import MediaError

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""The formats that are read. Pillow knows more, some of which run other programs."""
EXAMPLES = {
    "image": "data:image/png;base64,…",
    "video": "data:video/mp4;base64,…",
    "audio": "data:audio/wav;base64,…",
}
"""Data URLs, by kind of media."""
NAMES = {"image": "an image", "video": "a video", "audio": "an audio"}


class PixelBudget(Budget):
    """The pixels that all images and frames of one request may have together."""

    def __init__(self, pixels: int = limits.MAX_REQUEST_PIXELS) -> None:
        super().__init__(pixels, "images and frames", "pixels")


@functools.cache
def _formats() -> list[str]:
    """Those that the installed Pillow has."""
    pillow = require_library("PIL.Image", "vision")
    pillow.init()
    return [name for name in FORMATS if name in pillow.OPEN]


def decode_image(data: bytes, budget: PixelBudget) -> Pixels:
    """An image file's pixels, turned as its EXIF data say; of an animation the first frame.
    Raises MediaError: it is none, it is broken, or it is too large."""
    formats = _formats()
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image: Any = Image.open(io.BytesIO(data), formats=formats)
        width, height = image.size
        if width * height > limits.MAX_IMAGE_PIXELS:
            raise MediaError(f"the image has {width} x {height} pixels; at most {limits.MAX_IMAGE_PIXELS} are allowed")
        budget.take(width * height)
        image.load()
        return read_image(ImageOps.exif_transpose(image), "the image")
    except (MediaError, RequestError) as error:
        raise MediaError(str(error)) from None
    except UnidentifiedImageError:  # its text has an address in memory
        raise MediaError(f"the image cannot be decoded: it is none of {', '.join(formats)}") from None
    except Exception as error:  # whatever a decoder of foreign bytes raises
        raise MediaError(f"the image cannot be decoded: {error}") from None


def read_data_url(url: str, kind: str = "image") -> bytes:
    """The bytes of a URL like `data:image/…;base64,…`, of a kind of media. Raises MediaError: it is none, or too long."""
    head, comma, body = url.partition(":")[2].partition(",")
    if not comma or not head.lower().startswith(f"{kind}/"):
        raise MediaError(f"{url[:40]!r} is no data URL of {NAMES[kind]}: {EXAMPLES[kind]}")
    if not head.lower().endswith(";base64"):
        raise MediaError("the data URL is not base64")
    return decode_base64(body, most_bytes(kind))


def most_bytes(kind: str) -> int:
    """Of a file of a kind of media."""
    return limits.MAX_VIDEO_BYTES if kind == "video" else limits.MAX_MEDIA_BYTES


def decode_base64(text: str, most: int = limits.MAX_MEDIA_BYTES) -> bytes:
    """The bytes of a file as text. Raises MediaError: it is none, or too long."""
    if len(text) > most * 4 // 3 + 4:
        raise MediaError(f"it has more than {most} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("its base64 cannot be decoded") from None
