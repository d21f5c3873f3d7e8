"""Server-sent events: the chunks of a stream, written from parts that were encoded once.

The common chunk (one choice, some text, nothing else) is three byte strings joined; only its text is encoded. Everything
rarer (logprobs, finish, usage) is encoded as a small object between the same constant head and tail.
"""

from typing import Any

import msgspec

from quire.entrypoints.openai.errors import HTTPError
from quire.entrypoints.openai.responses import Timing, Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes one stream's chunks.

    Args:
        kind: the protocol's `object`: `chat.completion.chunk` or `text_completion`.
        text_field: what stands around the text in a choice, after its index.
        include_usage: whether chunks carry `usage` (null until the last one, unless they are given one).
        fingerprint: what chunks tell of the configuration; None for nothing.
    """

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        kind: str,
        text_field: tuple[str, str],
        include_usage: bool,
        fingerprint: str | None = None,
    ) -> None:
        fields: dict[str, Any] = {"id": request_id, "object": kind, "created": created, "model": model}
        if fingerprint is not None:
            fields["system_fingerprint"] = fingerprint
        self._head = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._text_field = text_field
        self._heads: dict[str | tuple[int, str], bytes] = {}
        self._text_tail = text_field[1].encode() + self._tail

    def text(self, index: int, text: str, field: str = "content") -> bytes:
        """A chunk that carries nothing but text, of the message's content or its reasoning (`field`)."""
        key = (index, field) if index else field  # a tuple costs as much as all the rest
        head = self._heads.get(key)
        if head is None:
            before = self._text_field[0].replace("content", field)
            head = self._heads[key] = self._head + b'{"index":%d,%s' % (index, before.encode())
        return b"".join((head, _encode(text), self._text_tail))

    def choice(self, choice: dict[str, Any], usage: Usage | None = None) -> bytes:
        """A chunk with one choice of any content."""
        if usage is None:
            return self._head + _encode(choice) + self._tail
        return self._head + _encode(choice) + b'],"usage":' + _encode(usage) + b"}\n\n"

    def usage(self, usage: Usage, timing: Timing | msgspec.UnsetType = msgspec.UNSET) -> bytes:
        """The last chunk before the end: no choice, the whole stream's usage, and its times where they are wanted."""
        metrics = b"" if timing is msgspec.UNSET else b',"metrics":' + _encode(timing)
        return self._head + b'],"usage":' + _encode(usage) + metrics + b"}\n\n"


def chat_chunk_writer(
    request_id: str, created: int, model: str, include_usage: bool, fingerprint: str | None = None
) -> ChunkWriter:
    around = ('"delta":{"content":', '},"logprobs":null,"finish_reason":null}')
    return ChunkWriter(request_id, created, model, "chat.completion.chunk", around, include_usage, fingerprint)


def completion_chunk_writer(
    request_id: str, created: int, model: str, include_usage: bool, fingerprint: str | None = None
) -> ChunkWriter:
    around = ('"text":', ',"logprobs":null,"finish_reason":null,"stop_reason":null}')
    return ChunkWriter(request_id, created, model, "text_completion", around, include_usage, fingerprint)


def error_event(error: HTTPError) -> bytes:
    """An error in a stream whose status has already been sent."""
    return b"data: " + error.body() + b"\n\n"
