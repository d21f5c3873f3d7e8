"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`: a form with a sound, within bounds, and its other fields."""

import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire import envs
from quire.engine.caller import CALLER, check_timeout
from quire.entrypoints.audio import transcripts
from quire.entrypoints.audio.hearing import Hearing, NewText, as_file_error, prepare_hearing
from quire.entrypoints.audio.transcripts import Transcription, TranscriptionRequest
from quire.entrypoints.http.decoding import stream_body
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.form import FormReader, read_form
from quire.entrypoints.http.long_bodies import encode
from quire.entrypoints.http.route_tools import Endpoint, Handler, json_response, public_id, state_of
from quire.entrypoints.http.streaming import EventStream, failure_of, run_while_connected
from quire.errors import RequestError
from quire.multimodal.audio import decode_audio
from quire.outputs import CompletionOutput

MAX_FIELD_BYTES = 64 << 10
FORM_BYTES = 256 << 10
"""Room for a form's fields besides its file."""
UPLOAD_TIMEOUT_S = 600.0
LISTS = ("timestamp_granularities",)


async def read_upload(request: Request) -> tuple[bytes, TranscriptionRequest]:
    """The file's bytes and the request.
    Raises HTTPError: a 400 with the field, or a 413 for a file that is too large."""
    limit = envs.QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB << 20
    pieces = stream_body(request, limit + FORM_BYTES, UPLOAD_TIMEOUT_S)
    form = FormReader(request.headers.get("content-type", ""), pieces)
    file = bytearray()

    async def write(piece: bytes) -> None:
        file.extend(piece)

    _, fields = await read_form(form, write, limit, "QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB", MAX_FIELD_BYTES)
    if not file:
        raise bad_field("file", "it is empty.")
    warnings: list[str] = request.scope["state"].setdefault("warnings", [])
    return bytes(file), state_of(request).decoder.decode_form(_typed(fields), TranscriptionRequest, warnings)


def _typed(fields: Mapping[str, list[str]]) -> dict[str, Any]:
    """Each field's text, or its texts where it is a list."""
    for name, given in fields.items():
        if len(given) > 1 and name not in LISTS:
            raise bad_field(name[:60], "the form has more than one.")
    return {name: given if name in LISTS else given[0] for name, given in fields.items()}


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
                    return EventStream(_events(hearing))
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
    """Writes a stream's chunks, as vLLM does."""

    def __init__(self, hearing: Hearing) -> None:
        self._hearing = hearing
        head = {"id": hearing.public_id, "object": f"{_NAMES[hearing.task][0]}.chunk", "created": int(time.time())}
        self._head = {**head, "model": hearing.model}
        self._texts, self._num_tokens = NewText(hearing.tokens), 0

    def take(self, index: int, completion: CompletionOutput) -> bytes:
        """The event of a part's new tokens; nothing where they make no whole character."""
        self._num_tokens += len(completion.token_ids)
        new = self._texts.take(index, completion)
        is_last = completion.finish_reason is not None and index == len(self._hearing.parts) - 1
        if not new and not is_last:
            return b""
        reasons = (completion.finish_reason, completion.stop_reason) if is_last else (None, None)
        choice = {"delta": {"content": new}, "finish_reason": reasons[0], "stop_reason": reasons[1]}
        return self._event([choice], has_usage=self._hearing.request.stream_continuous_usage_stats)

    def end(self) -> bytes:
        """What comes last: the usage, if the request asks for it."""
        return self._event([], has_usage=True) if self._hearing.request.stream_include_usage else b""

    def _event(self, choices: list[dict[str, Any]], *, has_usage: bool) -> bytes:
        seconds = transcripts.usage_of(self._hearing.duration).seconds
        usage = {"type": "duration", "seconds": seconds, "completion_tokens": self._num_tokens}
        chunk = {**self._head, "choices": choices, **({"usage": usage} if has_usage else {})}
        return b"data: " + encode(chunk) + b"\n\n"


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
