"""What requests to `/v1/audio/…` hold, and what answers do: OpenAI's fields, and vLLM's further ones.

https://platform.openai.com/docs/api-reference/audio
"""

from typing import Any, Literal

import msgspec

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """The fields of the form besides its file."""

    model: str | None = None
    language: str | None = None
    to_language: str | None = None
    prompt: str | None = None
    response_format: ResponseFormat = "json"
    temperature: float = 0.0
    timestamp_granularities: list[Literal["segment", "word"]] = []
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    timeout: float | None = None


SAMPLING = ("top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Fields that go to the sampler as they are."""


class DurationUsage(msgspec.Struct):
    """What was heard, in whole seconds that have begun."""

    seconds: int
    type: Literal["duration"] = "duration"


class Transcription(msgspec.Struct):
    """An answer in the format `json`."""

    text: str
    usage: DurationUsage


class Segment(msgspec.Struct):
    """A part of a sound between two timestamps, in seconds.

    Attributes:
        seek: the frame (of a hundredth of a second) at which the part of the sound begins that was heard at once.
        avg_logprob: of its tokens. compression_ratio: of its text by zlib; much above 2 means repetition.
        no_speech_prob: how likely the model found it that nobody speaks in the part.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(msgspec.Struct):
    """An answer in the format `verbose_json`."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[Segment]
    usage: DurationUsage


class TranscriptionDelta(msgspec.Struct):
    """New text of a stream."""

    content: str


class StreamChoice(msgspec.Struct):
    """The one choice of a stream's chunk."""

    delta: TranscriptionDelta
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TranscriptionChunk(msgspec.Struct, omit_defaults=True):
    """A chunk of a stream, as vLLM writes it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[StreamChoice]
    usage: dict[str, Any] | None = None
