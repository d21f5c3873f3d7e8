"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.engine.caller import CALLER, check_timeout
from quire.entrypoints.audio import transcripts
from quire.entrypoints.audio.hearing import Hearing, NewText, as_file_error, prepare_hearing
from quire.entrypoints.audio.transcription_protocol import (
    StreamChoice,
    Transcription,
    TranscriptionChunk,
    TranscriptionDelta,
    TranscriptionRequest,
)
from quire.entrypoints.audio.upload import read_upload
from quire.entrypoints.http.route_tools import Endpoint, Handler, json_response, public_id, state_of
from quire.entrypoints.http.streaming import EventStream, failure_of, run_while_connected
from quire.errors import RequestError
from quire.multimodal.audio_files import decode_audio

DONE = b"data: [DONE]\n\n"
_NAMES = {"transcribe": ("transcription", "trsc"), "translate": ("translation", "trsl")}
ENGLISH = "en"


def _route(task: str) -> Handler:
    async def handler(request: Request) -> Response:
        state = state_of(request)
        state.accept_work()
        with state.preparing():
            data, body = await read_upload(request)
            await state.gate.enter()
            state.accept_work()
            if body.timeout is not None:
                CALLER.set(CALLER.get().until(time.monotonic() + check_timeout(body.timeout)))
            name = f"{_NAMES[task][1]}-{public_id(request, body)}"

        async def work() -> Response:
            try:
                with state.preparing():
                    hearing = await prepare_hearing(state, partial(decode_audio, data), body, task, name)
                await hearing.listen()
                if body.stream:
                    return EventStream(b"", _events(hearing))
                return await _answer(hearing)
            except RequestError as error:
                raise as_file_error(error) from None

        return await run_while_connected(request, work())

    return handler


async def _answer(hearing: Hearing) -> Response:
    """The whole answer in the format that the request names."""
    parts, wanted = await hearing.finish(), hearing.request.response_format
    if wanted in ("json", "text"):
        text = transcripts.plain_text(hearing.tokens, [part.token_ids for part in parts])
        return PlainTextResponse(text) if wanted == "text" else json_response(transcripts.plain(text, hearing.duration))
    segments = transcripts.segments_of(hearing.tokens, parts, hearing.request.temperature)
    if wanted == "srt":
        return PlainTextResponse(transcripts.srt(segments))
    if wanted == "vtt":
        return PlainTextResponse(transcripts.vtt(segments), media_type="text/vtt")
    language = hearing.language or ENGLISH
    return json_response(transcripts.verbose(hearing.task, language, hearing.duration, segments))


async def _events(hearing: Hearing) -> AsyncGenerator[bytes, None]:
    """The stream: new text as it is written, part by part."""
    chunks = _Chunks(hearing)
    try:
        async for index, output in hearing.stream():
            event = chunks.take(index, output.outputs[0])
            if event:
                yield event
        yield chunks.end() + DONE
    except Exception as error:  # the headers are sent: the stream tells it
        failure = as_file_error(error) if isinstance(error, RequestError) else error
        body = failure_of(failure, hearing.public_id).body(hearing.state.settings.error_format)
        yield b"data: " + body + b"\n\n" + DONE


class _Chunks:
    """Writes a stream's chunks."""

    def __init__(self, hearing: Hearing) -> None:
        self._hearing, self._created = hearing, int(time.time())
        self._texts, self._num_tokens = NewText(hearing.tokens), 0

    def take(self, index: int, completion: Any) -> bytes:
        """The event of a part's new tokens; nothing where they make no whole character."""
        self._num_tokens += len(completion.token_ids)
        new = self._texts.take(index, completion)
        is_last = completion.finish_reason is not None and index == len(self._hearing.parts) - 1
        if not new and not is_last:
            return b""
        choice = StreamChoice(TranscriptionDelta(new))
        if is_last:
            choice.finish_reason, choice.stop_reason = completion.finish_reason, completion.stop_reason
        return self._event([choice], has_usage=self._hearing.request.stream_continuous_usage_stats)

    def end(self) -> bytes:
        """What comes last: the usage, if the request asks for it."""
        return self._event([], has_usage=True) if self._hearing.request.stream_include_usage else b""

    def _event(self, choices: list[StreamChoice], *, has_usage: bool) -> bytes:
        hearing = self._hearing
        chunk = TranscriptionChunk(
            hearing.public_id, f"{_NAMES[hearing.task][0]}.chunk", self._created, hearing.model, choices
        )
        if has_usage:
            chunk.usage = {
                "type": "duration",
                "seconds": transcripts.usage_of(hearing.duration).seconds,
                "completion_tokens": self._num_tokens,
            }
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


_KINDS = {"float": "number", "int": "integer", "bool": "boolean", "list": "array"}
_FORM = {
    "file": "binary",
    **{
        name: next((word for kind, word in _KINDS.items() if kind in str(annotation)), "string") + "?"
        for name, annotation in TranscriptionRequest.__annotations__.items()
    },
}

WORK = (
    Endpoint(
        "/v1/audio/transcriptions",
        _route("transcribe"),
        "Write what is said in a sound file; `stream: true` gives server-sent events.",
        answer=Transcription,
        form=_FORM,
    ),
    Endpoint(
        "/v1/audio/translations",
        _route("translate"),
        "Write in English what is said in a sound file.",
        answer=Transcription,
        form=_FORM,
    ),
)
