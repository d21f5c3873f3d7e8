"""The images of a conversation: taken out of its messages, with a marker in each one's place; and text that looks like a marker,
which stays text.

A template writes the model's marker for an image. A user who types the same words must not make a place for an image, so in
text they are replaced by a word that nobody knows while the template runs, and tokenized apart from what is around them. Knows
parts of messages and data URLs; fetches nothing.
"""

import base64
import binascii
import io
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from quire.config import limits
from quire.errors import RequestError
from quire.guards import is_mapping, is_sequence

IMAGE_PARTS = ("image_url", "input_image", "image", "image_pil")


class MediaPart(dict[str, str]):
    """A part of a message that stands for an image, as templates read it; its text is the marker, for templates of text alone."""


class MediaMessages:
    """A conversation without its media.

    Args:
        messages: as users write them.
        marker: the model's token for an image, as text.
        field: the conversation's name, for errors.

    Attributes:
        messages: with a `MediaPart` in the place of each image.
        images: in order.

    Raises:
        RequestError: an image cannot be read; `param` is the path of its part.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], marker: str, field: str = "messages") -> None:
        self._marker, self._stand_in = marker, f"\ue000{secrets.token_hex(8)}\ue001"
        self.images: list[Any] = []
        self.messages: list[dict[str, Any]] = [
            self._take_out(message, f"{field}[{index}]") for index, message in enumerate(messages)
        ]

    def _take_out(self, message: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {
            key: self._parts(value, f"{path}.content") if key == "content" else self._hidden(value)
            for key, value in message.items()
        }

    def _parts(self, content: Any, path: str) -> Any:
        if not is_sequence(content):
            return self._hidden(content)
        return [self._part(part, f"{path}[{index}]") for index, part in enumerate(content)]

    def _part(self, part: Any, path: str) -> Any:
        kind = part.get("type") if is_mapping(part) else None
        if kind not in IMAGE_PARTS:
            return self._hidden(part)
        self.images.append(_read_part(cast("Mapping[str, Any]", part), str(kind), path))
        return MediaPart(type="image", text=self._marker)

    def _hidden(self, value: Any) -> Any:
        """A value whose texts have no marker."""
        if isinstance(value, str):
            return value.replace(self._marker, self._stand_in)
        if isinstance(value, Mapping):
            return {key: self._hidden(each) for key, each in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [self._hidden(each) for each in cast("Sequence[Any]", value)]
        return value

    def text(self, rendered: str) -> str:
        """What a template made, with the words that users typed."""
        return rendered.replace(self._stand_in, self._marker)

    def tokenize(self, rendered: str, encode: Callable[[str, bool], list[int]]) -> list[int]:
        """The token ids of what a template made; words that look like a marker are cut in two before they are tokenized.
        `encode` is told whether a text is the first one."""
        begin, end = self._marker[:1], self._marker[1:]
        pieces = rendered.split(self._stand_in)
        texts = [
            (end if index else "") + piece + (begin if index < len(pieces) - 1 else "")
            for index, piece in enumerate(pieces)
        ]
        return [token_id for index, text in enumerate(texts) for token_id in encode(text, index == 0)]


def _read_part(part: Mapping[str, Any], kind: str, path: str) -> Any:
    given: Any = part.get(kind, part.get("image_url"))
    if is_mapping(given):
        given = given.get("url")
    path = f"{path}.{kind}"
    if kind in ("image", "image_pil") and given is not None and not isinstance(given, str):
        return given
    if not isinstance(given, str):
        raise _wrong(path, "expected an image or a URL")
    return read_data_url(given, path)


def read_data_url(url: str, path: str) -> Any:
    """The image of a `data:image/…;base64,…` URL, as PIL's, decoded and not larger than allowed.
    Raises RequestError: it is no such URL, or no image; `param` is the path."""
    scheme, _, rest = url.partition(":")
    head, comma, body = rest.partition(",")
    if scheme.lower() != "data" or not comma or not head.lower().startswith("image/"):
        shown = url[:40] + ("…" if len(url) > 40 else "")
        raise _wrong(path, f"{shown!r} is not supported; give the image itself, as data:image/png;base64,…")
    if not head.lower().endswith(";base64"):
        raise _wrong(path, "the data URL is not base64")
    if len(body) > limits.MAX_MEDIA_BYTES * 4 // 3 + 4:
        raise _wrong(path, f"the image has more than {limits.MAX_MEDIA_BYTES} bytes")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong(path, "its base64 cannot be decoded") from None
    return decode_image(data, path)


def decode_image(data: bytes, path: str) -> Any:
    """An image file's pixels, as PIL's image. Raises RequestError: it is none, it is broken, or it is too large."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        width, height = image.size
        if width * height > limits.MAX_IMAGE_PIXELS:
            raise _wrong(
                path, f"the image has {width} x {height} pixels; at most {limits.MAX_IMAGE_PIXELS} are allowed"
            )
        image.load()
    except RequestError:
        raise
    except Exception as error:  # whatever a decoder of foreign bytes raises
        raise _wrong(path, f"the image cannot be decoded: {error}") from None
    return image


def _wrong(path: str, why: str) -> RequestError:
    return RequestError(f"{path}: {why}.", param=path)
