"""What a realtime session and its responses are told to do: the session as events tell it, and as a request to `/v1/responses`.

https://platform.openai.com/docs/api-reference/realtime
"""

from typing import Any, Literal

import msgspec

from quire.entrypoints.http.decoding import convert
from quire.entrypoints.http.errors import Fields, bad_field, object_at
from quire.entrypoints.realtime.sounds import SoundFormat
from quire.entrypoints.responses.protocol import ResponsesRequest, new_id

VLLM_FORMAT = {"type": "audio/pcm", "rate": 16000}


class InputTranscription(msgspec.Struct):
    """How the client's sounds are written."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class SoundInput(msgspec.Struct):
    """The client's sounds. `turn_detection` is read so that it can be refused by name."""

    format: SoundFormat = SoundFormat()
    transcription: InputTranscription | None = None
    turn_detection: Any = None


class SessionAudio(msgspec.Struct):
    """Sounds go in alone: nothing of `output` is read."""

    input: SoundInput


class RealtimeSettings(ResponsesRequest, kw_only=True):
    """A session's, or a response's: those of `/v1/responses`, and the realtime protocol's own."""

    type: Literal["realtime", "transcription"]
    audio: SessionAudio
    input: list[Fields] | None = None
    conversation: Literal["auto", "none"] = "auto"
    max_output_tokens: int | Literal["inf"] | None = None
    output_modalities: list[str] = []
    truncation: Any = None
    include: Any = None


class _OfSession(msgspec.Struct):
    session: RealtimeSettings


class _OfResponse(msgspec.Struct):
    response: RealtimeSettings


def new_session(model: str, *, transcribes: bool) -> Fields:
    """A session before its client has said anything."""
    transcription = {"model": model} if transcribes else None
    heard: Fields = {"format": {"type": "audio/pcm", "rate": 24000}, "transcription": transcription}
    return {
        "type": "transcription" if transcribes else "realtime",
        "object": "realtime.session",
        "id": new_id("sess"),
        "model": model,
        "output_modalities": ["text"],
        "instructions": "",
        "audio": {"input": {**heard, "turn_detection": None, "noise_reduction": None}},
        "tools": [],
        "tool_choice": "auto",
        "max_output_tokens": "inf",
    }


def updated_session(session: Fields, given: Fields) -> tuple[Fields, RealtimeSettings]:
    """A session with what its client changes. Raises HTTPError, a 400 whose `param` is the path of what is wrong."""
    audio = object_at(given.get("audio") or {}, "session.audio")
    heard = object_at(audio.get("input") or {}, "session.audio.input")
    merged = {**session, **given, "audio": {**audio, "input": {**session["audio"]["input"], **heard}}}
    merged |= {name: session[name] for name in ("id", "object")}
    settings = convert({"session": merged}, _OfSession).session
    _check(settings, "session")
    return merged, settings


def response_settings(session: Fields, given: Fields) -> RealtimeSettings:
    """A response's, which begins as its session says. Raises HTTPError, a 400 whose `param` is the path of what is wrong."""
    settings = convert({"response": {**session, **given, "audio": session["audio"]}}, _OfResponse).response
    _check(settings, "response")
    return settings


def _check(settings: RealtimeSettings, path: str) -> None:
    if "audio" in settings.output_modalities:
        raise bad_field(f"{path}.output_modalities", "no sound is made here; give ['text'].", "not_supported")
    if settings.audio.input.turn_detection is not None:
        message = "turns are not detected here: give null, and commit the buffer at the end of each turn."
        raise bad_field(f"{path}.audio.input.turn_detection", message, "not_supported")
