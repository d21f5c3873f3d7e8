"""Finished transcripts in the formats that answers may have.

Knows texts and times. Knows no engine.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence

from quire.entrypoints.audio.transcription_protocol import DurationUsage, Segment, Transcription, VerboseTranscription
from quire.entrypoints.audio.whisper_tokens import WhisperTokens


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


def verbose(task: str, language: str, duration: float, segments: list[Segment]) -> VerboseTranscription:
    """The format `verbose_json`."""
    text = "".join(segment.text for segment in segments).strip()
    return VerboseTranscription(task, language, round(duration, 2), text, segments, usage_of(duration))


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
