"""The chunks of OpenAI's streams, written from parts that are encoded once.

The common chunk (one choice, some text, nothing else) is three byte strings joined, of which only the text is encoded.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.engine.request_stream import MergedStream, OutputStream
from quire.entrypoints.http.long_bodies import encode, pieces_of
from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.http.streaming import failure_of
from quire.entrypoints.openai.generation import Generation, total_timing, total_usage
from quire.entrypoints.openai.protocol import GenerationFields, StreamOptions, Timing, Usage

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Writes one stream's chunks.

    Args:
        fields: what every chunk begins with.
        text_field: the text before and after the text of a choice, after its index.
        include_usage: whether chunks carry `usage` (null until the last one, unless they are given one).
    """

    def __init__(self, fields: dict[str, Any], text_field: tuple[str, str], include_usage: bool) -> None:
        self._head = b"data: " + encode(fields)[:-1] + b',"choices":['
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
        return b"".join((head, encode(text), self._text_tail))

    def choice(self, choice: Any, usage: Usage | None = None, beside: dict[str, Any] | None = None) -> bytes:
        """A chunk with one choice of any content, and with other fields beside the choices."""
        tail = self._tail if usage is None else b'],"usage":' + encode(usage) + b"}\n\n"
        if beside:
            tail = b"]," + encode(beside)[1:-1] + tail[1:]
        return self._head + encode(choice) + tail

    def long_choice(self, choice: Any, usage: Usage | None = None) -> Iterator[bytes]:
        """As `choice`, in pieces."""
        tail = self._tail if usage is None else b'],"usage":' + encode(usage) + b"}\n\n"
        return itertools.chain((self._head,), pieces_of(choice), (tail,))

    def usage(self, usage: Usage, timing: Timing | None = None) -> bytes:
        """The last chunk before the end: no choice, the whole stream's usage, and its times where they are wanted."""
        metrics = b""
        if timing is not None:
            known = {name: value for name, value in msgspec.structs.asdict(timing).items() if value is not None}
            metrics = b',"metrics":' + encode(known)
        return self._head + b'],"usage":' + encode(usage) + metrics + b"}\n\n"


CHAT_TEXT = ('"delta":{"content":', '},"logprobs":null,"finish_reason":null}')
COMPLETION_TEXT = (
    '"text":',
    ',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}',
)
"""The text before and after the text of a choice."""


def chunk_fields(generation: Generation[Any], kind: str) -> dict[str, Any]:
    """What every chunk begins with. `kind`: the protocol's `object`."""
    fields: dict[str, Any] = {"id": generation.public_id, "object": kind}
    fields |= {"created": generation.created, "model": generation.model}
    fingerprint = generation.state.fingerprint
    return fields if fingerprint is None else fields | {"system_fingerprint": fingerprint}


class ChunkStream:
    """What the streams of OpenAI's routes share: which chunks carry usage, and how a stream ends.

    Args:
        generations: one for each prompt.
        fields: what every chunk begins with.
        options: what the request says of usage.
        is_timed: the request asks for times, which come with the last usage.
    """

    def __init__(
        self,
        generations: Sequence[Generation[Any]],
        fields: dict[str, Any],
        text_field: tuple[str, str],
        options: StreamOptions | None,
        is_timed: bool | None = None,
    ) -> None:
        includes = options is not None and bool(options.include_usage)
        self._continuous = includes and options is not None and bool(options.continuous_usage_stats)
        self._include_usage = includes or bool(is_timed)
        self._generations = generations
        self._writer = ChunkWriter(fields, text_field, self._include_usage)

    async def open(self) -> OutputStream:
        """Queue a request for each prompt."""
        streams: list[OutputStream] = []
        try:
            for generation in self._generations:
                stream = await generation.open()
                streams.append(stream)  # if a later one fails, those that are open are closed
        except BaseException:
            MergedStream(streams).close()
            raise
        return streams[0] if len(streams) == 1 else MergedStream(streams)

    async def end(self, error: Exception | None) -> bytes:
        """The error, or the whole stream's usage where it is wanted; and the protocol's end."""
        first = self._generations[0]
        if error is not None:
            failure = failure_of(error, first.public_id)
            return b"data: " + failure.body(first.state.settings.error_format) + b"\n\n" + DONE
        if not self._include_usage:
            return DONE
        counts = [generation.count for generation in self._generations]
        return self._writer.usage(total_usage([count.usage() for count in counts]), total_timing(counts)) + DONE


def stream_options(settings: ServerSettings, request: GenerationFields) -> StreamOptions | None:
    """What a stream tells of usage: the request's choice, unless the operator has usage in every chunk."""
    if settings.enable_force_include_usage:
        return StreamOptions(include_usage=True, continuous_usage_stats=True)
    return request.stream_options
