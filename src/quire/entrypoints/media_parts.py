"""The images, videos and sounds of a conversation: taken out of its messages, with a marker in each one's place; and text that
looks like a marker, which stays text.

A template writes the model's marker for an image. A user who types the same words must not make a place for an image, so in
text they are replaced by a word that nobody knows while the template runs, and tokenized apart from what is around them. Knows
parts of messages; what is behind a URL is `quire.multimodal`'s to read.
"""

import asyncio
import dataclasses
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from quire.errors import RequestError
from quire.guards import is_mapping, is_sequence
from quire.media import AUDIO, AUDIO_EMBEDS, IMAGE, IMAGE_EMBEDS, MADE_BEFORE, VIDEO
from quire.multimodal.given_embeds import decode_item_embeds
from quire.multimodal.image_files import decode_base64
from quire.multimodal.media_source import Decoders, MediaSource, decoders
from quire.multimodal.video_files import reading_of
from quire.multimodal.web_fetch import MediaError

KINDS = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_pil", IMAGE_EMBEDS), IMAGE),
    **dict.fromkeys(("video_url", "video"), VIDEO),
    **dict.fromkeys(("audio_url", "input_audio", "audio", AUDIO_EMBEDS), AUDIO),
}
"""Modalities of parts, by type."""
HELD = ("image", "image_pil", "video", "audio", *MADE_BEFORE.values())
"""Types of parts that may have what the part is, and not only a URL of it."""


class MediaPart(dict[str, str]):
    """A part of a message that stands for an image, a video or a sound, as templates read it; its text is the marker, for
    templates of text alone."""


class PlacedPart(dict[str, Any]):
    """A part of a message as chat completions have it, which a client wrote in another protocol.

    Attributes:
        path: of the part, as the client wrote it.
        field: of what is in it.
    """

    def __init__(self, fields: Mapping[str, Any], path: str, field: str) -> None:
        super().__init__(fields)
        self.path, self.field = path, field


Content = str | list[dict[str, Any]]
"""What a message says: a text, or parts."""


def content_of(pieces: Sequence[str | PlacedPart]) -> Content:
    """Texts, which are lines of one text, or parts where there is more than text."""
    if any(isinstance(piece, PlacedPart) for piece in pieces):
        return [_as_part(piece) for piece in pieces]
    return "\n".join(cast("Sequence[str]", pieces))


def join_content(first: Content, second: Content) -> Content:
    """What one speaker says in two messages."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}" if first else second
    return [*_parts_of(first), *_parts_of(second)]


def _parts_of(content: Content) -> list[dict[str, Any]]:
    return ([_as_part(content)] if content else []) if isinstance(content, str) else content


def _as_part(piece: str | PlacedPart) -> dict[str, Any]:
    return {"type": "text", "text": piece} if isinstance(piece, str) else piece


@dataclasses.dataclass(frozen=True)
class GivenMedia:
    """An image, a video or a sound as a message has it.

    Attributes:
        kind: the type of its part.
        value: a URL, the bytes of a file as text (`input_audio`), or the thing itself; None where its name stands for it.
        field: the path of its part.
        uuid: its name, where the client gives one.
    """

    kind: str
    value: Any
    field: str
    uuid: str | None

    @property
    def modality(self) -> str:
        """What it is."""
        return KINDS[self.kind]


class MediaMessages:
    """A conversation without its media.

    Args:
        messages: as users write them.
        markers: the model's token for an image and for a sound, as text, by modality; of those that it reads.
        is_text: a template makes a text of it, in which words that look like a marker would be one.

    Attributes:
        messages: with a `MediaPart` in the place of each image and sound.
        given: these, in order.

    Raises:
        RequestError: a part has none; `param` is its path.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        markers: Mapping[str, str],
        *,
        is_text: bool = True,
    ) -> None:
        self._markers, hidden = markers, markers.values() if is_text else ()
        self._stand_ins = {f"\ue000{secrets.token_hex(8)}\ue001": marker for marker in hidden if marker}
        self.given: list[GivenMedia] = []
        self.messages: list[dict[str, Any]] = [
            self._take_out(message, f"messages[{index}]") for index, message in enumerate(messages)
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
        modality = KINDS.get(str(kind), "")
        if modality not in self._markers:
            return self._hidden(part)
        self.given.append(_given(cast("Mapping[str, Any]", part), str(kind), path))
        return MediaPart(type=modality, text=self._markers[modality])

    def _hidden(self, value: Any) -> Any:
        """A value whose texts have no marker."""
        if isinstance(value, str):
            for stand_in, marker in self._stand_ins.items():
                value = value.replace(marker, stand_in)
            return value
        if isinstance(value, Mapping):
            return {key: self._hidden(each) for key, each in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [self._hidden(each) for each in cast("Sequence[Any]", value)]
        return value

    def text(self, rendered: str) -> str:
        """What a template made, with the words that users typed."""
        for stand_in, marker in self._stand_ins.items():
            rendered = rendered.replace(stand_in, marker)
        return rendered

    def tokenize(self, rendered: str, encode: Callable[[str, bool], list[int]]) -> list[int]:
        """The token ids of what a template made; words that look like a marker are cut in two before they are tokenized.
        `encode` is told whether a text is the first one."""
        texts = [""]
        for piece in re.split(f"({'|'.join(self._stand_ins)})", rendered):
            if (marker := self._stand_ins.get(piece)) is None:
                texts[-1] += piece
            else:
                texts[-1] += marker[:1]
                texts.append(marker[1:])
        return [token_id for index, text in enumerate(texts) for token_id in encode(text, index == 0)]

    def count(self) -> dict[str, int]:
        """How many there are of each modality."""
        return {name: sum(each.modality == name for each in self.given) for name in self._markers}

    def read(self, source: MediaSource, io: Any = None) -> list[Any]:
        """The images, videos and sounds. `io`: the request's own `media_io_kwargs`.
        Raises RequestError: one cannot be had; `param` is the path of its part."""
        pending = self._submit(source, io)
        try:
            return [_result(one, given) for one, given in zip(pending, self.given, strict=True)]
        finally:
            _cancel(pending)

    async def read_async(self, source: MediaSource, io: Any = None) -> list[Any]:
        """As `read`, without holding up the event loop."""
        pending = self._submit(source, io)
        try:
            for one in pending:
                if isinstance(one, Future):
                    await asyncio.gather(asyncio.wrap_future(cast("Future[Any]", one)), return_exceptions=True)
            return [_result(one, given) for one, given in zip(pending, self.given, strict=True)]
        finally:
            _cancel(pending)

    def _submit(self, source: MediaSource, io: Any) -> "list[Any]":
        """Each one, or the future of one that has to be read."""
        own = decoders(reading_of(source.video_reading, io))
        return [_submit(each, source, own) for each in self.given]


def _submit(given: GivenMedia, source: MediaSource, own: Decoders) -> Any:
    value = given.value
    if given.kind in MADE_BEFORE.values() and value is not None:
        return source.run(decode_item_embeds, value, given.kind, given.field)
    if not isinstance(value, str):
        return value
    if given.kind == "input_audio":
        return source.run(lambda: own[AUDIO](decode_base64(value)))
    return source.read(value, given.modality, own)


def hold_media(
    messages: Sequence[Mapping[str, Any]], given: Sequence[GivenMedia], items: Sequence[Any]
) -> list[dict[str, Any]]:
    """The messages with images, videos and sounds in the place of their URLs."""
    left = iter(zip(items, given, strict=True))
    read = {one.modality for one in given}

    def hold(part: Any) -> Any:
        if not is_mapping(part) or KINDS.get(str(part.get("type"))) not in read:
            return part
        item, one = next(left)
        return PlacedPart({"type": one.modality, one.modality: item, "uuid": one.uuid}, one.field, one.field)

    held: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        held.append({**message, "content": [hold(part) for part in content] if is_sequence(content) else content})
    return held


def _given(part: Mapping[str, Any], kind: str, path: str) -> GivenMedia:
    other = f"{KINDS[kind]}_url"
    value: Any = part.get(kind, part.get(other))
    if is_mapping(value) and kind not in MADE_BEFORE.values():
        value = value.get("data" if kind == "input_audio" else "url")
    uuid = part.get("uuid")
    path = part.field if isinstance(part, PlacedPart) else f"{path}.{kind if kind in part else other}"
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise _wrong(f"{path}.uuid", "expected a text")
    may_be_held = kind in HELD and value is not None
    if not isinstance(value, str) and not may_be_held and (value is not None or uuid is None):
        wanted = {IMAGE: "an image or a URL", VIDEO: "a video or a URL", AUDIO: "a sound or a URL"}[KINDS[kind]]
        raise _wrong(path, "expected data, base64 of a file" if kind == "input_audio" else f"expected {wanted}")
    return GivenMedia(kind, value, path, uuid)


def _result(one: Any, given: GivenMedia) -> Any:
    """An item, waited for if it is still read."""
    if not isinstance(one, Future):
        return one
    try:
        return cast("Future[Any]", one).result()
    except MediaError as error:
        raise _wrong(given.field, str(error)) from None


def _cancel(pending: Sequence[Any]) -> None:
    for one in pending:
        if isinstance(one, Future):
            cast("Future[Any]", one).cancel()


def _wrong(path: str, why: str) -> RequestError:
    return RequestError(f"{path}: {why}.", param=path)
