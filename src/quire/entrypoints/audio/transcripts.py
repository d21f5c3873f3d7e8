"""What requests to `/v1/audio/…` hold (OpenAI's fields, and vLLM's further ones), and finished transcripts in the formats that
answers may have.

https://platform.openai.com/docs/api-reference/audio. Knows texts and times. Knows no engine.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from quire.entrypoints.audio.whisper_tokens import WhisperTokens

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


@dataclasses.dataclass
class HeardPart:
    """What was written of a part of a sound.

    Attributes:
        start, end: in seconds of the whole.
        logprobs: of each token. no_speech: how likely nobody speaks.
    """

    start: float
    end: float
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    no_speech: float


def usage_of(duration: float) -> DurationUsage:
    """What was heard, for the bill."""
    return DurationUsage(math.ceil(duration))


def plain_text(tokens: WhisperTokens, parts: Sequence[Sequence[int]]) -> str:
    """The whole text."""
    return "".join(map(tokens.text, parts)).strip()


def plain(text: str, duration: float) -> Transcription:
    """The format `json`."""
    return Transcription(text, usage_of(duration))


def segments_of(tokens: WhisperTokens, parts: Sequence[HeardPart], temperature: float) -> list[Segment]:
    """Segments of all parts, in order."""
    segments: list[Segment] = []
    for part in parts:
        for span in tokens.spans(part.token_ids):
            text = tokens.text(span.token_ids)
            if not text.strip():
                continue
            end = part.end if span.end is None else min(part.end, part.start + span.end)
            logprobs = part.logprobs[span.first : span.first + len(span.token_ids)]
            encoded = text.encode()
            segments.append(
                Segment(
                    id=len(segments),
                    seek=round(part.start * 100),
                    start=round(min(part.start + span.start, end), 2),
                    end=round(end, 2),
                    text=text,
                    tokens=span.token_ids,
                    temperature=temperature,
                    avg_logprob=sum(logprobs) / max(1, len(logprobs)),
                    compression_ratio=len(encoded) / len(zlib.compress(encoded)),
                    no_speech_prob=part.no_speech,
                )
            )
    return segments


def verbose(task: str, language: str, duration: float, segments: list[Segment]) -> dict[str, Any]:
    """The format `verbose_json`."""
    text = "".join(segment.text for segment in segments).strip()
    told = {"task": task, "language": language, "duration": round(duration, 2), "text": text}
    return {**told, "segments": segments, "usage": usage_of(duration)}


def srt(segments: Sequence[Segment]) -> str:
    """SubRip's format."""
    return "".join(
        f"{segment.id + 1}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment)}\n\n"
        for segment in segments
    )


def vtt(segments: Sequence[Segment]) -> str:
    """WebVTT (https://www.w3.org/TR/webvtt1/)."""
    cues = (f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{_line(segment)}\n\n" for segment in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: Segment) -> str:
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
