"""`/v1/audio/transcriptions` and `/v1/audio/translations`, as OpenAI's client uses them: a server with a tiny model of Whisper,
whose answers are what Transformers writes.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_encoder_decoder import (
    LANGUAGES,
    RATE,
    START,
    EncoderDecoderOracle,
    draw_sound,
    make_tiny_encoder_decoder,
)

from quire.entrypoints.audio.whisper_tokens import WhisperTokens
from quire.multimodal.audio import split_sound
from quire.tokenizers.loader import get_tokenizer

soundfile = pytest.importorskip("soundfile")
soxr = pytest.importorskip("soxr")
ARCHITECTURE = "WhisperForConditionalGeneration"
SOUND = draw_sound(11, 14000)
LONG = draw_sound(12, 40000)
MOST = 12
FIELDS: dict[str, Any] = {"extra_body": {"max_completion_tokens": MOST}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder_decoder(ARCHITECTURE, tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--model", str(folder), "--max-num-seqs", "4", "--num-gpu-blocks-override", "40"]
    process = ServerProcess(*SERVE, *flags)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class Writer:
    """What the model writes, token by token, with Transformers."""

    def __init__(self, folder: Path) -> None:
        self._oracle, self.tokens = EncoderDecoderOracle(folder), WhisperTokens(get_tokenizer(str(folder)))

    def write(self, sound: np.ndarray, prompt: list[int], most: int = MOST) -> list[int]:
        written: list[int] = []
        while len(written) < most and (not written or written[-1] != 1):
            written.append(int(self._oracle.logprobs([*prompt, *written], sound=sound)[-1].argmax()))
        return written[:-1] if written[-1] == 1 else written

    def language(self, sound: np.ndarray) -> str:
        logprobs = self._oracle.logprobs([START], sound=sound)[-1]
        return max(LANGUAGES, key=lambda code: float(logprobs[self.tokens.languages[code]]))

    def text(self, sound: np.ndarray, language: str, task: str = "transcribe", before: str | None = None) -> str:
        return self.tokens.text(self.write(sound, self.tokens.prompt(language, task, before, has_times=False))).strip()


@pytest.fixture(scope="module")
def writer(folder: Path) -> Writer:
    return Writer(folder)


def file_of(
    samples: np.ndarray, kind: str = "WAV", rate: int = RATE, subtype: str | None = "FLOAT"
) -> tuple[str, bytes]:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return f"sound.{kind.lower()}", file.getvalue()


def test_a_sound_is_written_in_the_language_that_the_request_names(client: openai.OpenAI, writer: Writer) -> None:
    answer = client.audio.transcriptions.create(model="", file=file_of(SOUND), language="de", **FIELDS)
    assert answer.text == writer.text(SOUND, "de") and answer.usage.seconds == 1


def test_the_language_is_found_where_the_request_names_none(client: openai.OpenAI, writer: Writer) -> None:
    answer = client.audio.transcriptions.create(model="", file=file_of(SOUND), **FIELDS)
    assert answer.text == writer.text(SOUND, writer.language(SOUND))


def test_a_translation_has_its_own_task_and_a_prompt_stands_before(client: openai.OpenAI, writer: Writer) -> None:
    extra = {"max_completion_tokens": MOST, "language": "fr"}
    answer = client.audio.translations.create(model="", file=file_of(SOUND), prompt="a b", extra_body=extra)
    assert answer.text == writer.text(SOUND, "fr", "translate", "a b")


def test_a_long_sound_is_heard_in_parts(client: openai.OpenAI, writer: Writer) -> None:
    parts = [samples for _, samples in split_sound(LONG, RATE, 1.0)]
    assert len(parts) > 2 and sum(map(len, parts)) == len(LONG) and max(map(len, parts)) <= RATE
    prompt = writer.tokens.prompt("en", "transcribe", None, has_times=False)
    expected = "".join(writer.tokens.text(writer.write(part, prompt)) for part in parts).strip()
    answer = client.audio.transcriptions.create(model="", file=file_of(LONG), language="en", **FIELDS)
    assert answer.text == expected


def test_segments_have_times_within_the_sound(client: openai.OpenAI, writer: Writer) -> None:
    common: dict[str, Any] = {"model": "", "file": file_of(LONG), "language": "en", **FIELDS}
    answer = client.audio.transcriptions.create(
        response_format="verbose_json", timestamp_granularities=["segment"], **common
    )
    assert answer.language == "en" and answer.duration == pytest.approx(2.5) and answer.task == "transcribe"
    segments = answer.segments or []
    assert segments and [segment.id for segment in segments] == list(range(len(segments)))
    assert all(0 <= segment.start <= segment.end <= 2.5 for segment in segments)
    assert all(segment.avg_logprob < 0 and 0 < segment.no_speech_prob < 1 for segment in segments)
    assert answer.text == "".join(segment.text for segment in segments).strip()
    lines = [" ".join(segment.text.split()) for segment in segments]
    srt = client.audio.transcriptions.create(response_format="srt", **common)
    assert srt.count(" --> 00:00:0") == len(segments) and srt.startswith("1\n00:00:0")
    vtt = client.audio.transcriptions.create(response_format="vtt", **common)
    assert vtt.startswith("WEBVTT\n\n") and vtt.splitlines()[3::3] == lines
    text = client.audio.transcriptions.create(response_format="text", **common)
    assert isinstance(text, str) and text.strip() == writer_text(client, common)


def writer_text(client: openai.OpenAI, common: dict[str, Any]) -> str:
    return client.audio.transcriptions.create(**common).text


def test_a_stream_tells_the_same_text_in_chunks(server: ServerProcess, client: openai.OpenAI) -> None:
    whole = client.audio.transcriptions.create(model="", file=file_of(LONG), language="en", **FIELDS).text
    data = {
        "language": "en", "stream": "true", "max_completion_tokens": str(MOST), "stream_include_usage": "true",
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=data, files={"file": file_of(LONG)}, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]" and {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    text = "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])
    assert text.strip() == whole
    assert chunks[-1]["usage"]["seconds"] == 3 and chunks[-2]["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("8 kHz", lambda: file_of(soxr.resample(SOUND, RATE, 8000), rate=8000)),
        ("stereo", lambda: file_of(np.stack([SOUND, SOUND * 0.5], axis=1))),
        ("silence", lambda: file_of(np.zeros(8000, np.float32))),
        ("flac", lambda: file_of(SOUND * 0.2, "FLAC", subtype="PCM_16")),
        ("ogg", lambda: file_of(SOUND * 0.2, "OGG", subtype="VORBIS")),
        ("mp3", lambda: file_of(SOUND * 0.2, "MP3", subtype="MPEG_LAYER_III")),
        ("8 bits", lambda: file_of(SOUND * 0.2, subtype="PCM_U8")),
        ("one sample", lambda: file_of(SOUND[:1])),
        ("not a number", lambda: file_of(np.full(800, np.nan, np.float32))),
    ],
)
def test_every_kind_of_sound_is_answered(name: str, make: Any, client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.create(model="", file=make(), language="en", **FIELDS)
    assert isinstance(answer.text, str)


def test_a_sound_at_another_rate_is_heard_as_at_its_own(client: openai.OpenAI, writer: Writer) -> None:
    slow = soxr.resample(SOUND, RATE, 8000)
    answer = client.audio.transcriptions.create(model="", file=file_of(slow, rate=8000), language="en", **FIELDS)
    assert answer.text == writer.text(soxr.resample(slow, 8000, RATE), "en")


def test_a_file_that_breaks_off_is_answered_or_refused(server: ServerProcess) -> None:
    for kind, subtype in (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")):
        name, data = file_of(SOUND * 0.2, kind, subtype=subtype)
        for length in (1, 20, 60, len(data) // 2, len(data) - 1):
            answer = post(server, {"language": "en", "max_completion_tokens": "2"}, (name, data[:length]))
            assert answer.status_code in (200, 400), (kind, length, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["param"] == "file"


def post(server: ServerProcess, data: dict[str, Any], file: Any, route: str = "transcriptions") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/audio/{route}", data=data, files={"file": file} if file else None, timeout=60)


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({}, ("sound.wav", b""), "file"),
    ({}, ("sound.wav", b"garbage" * 100), "file"),
    ({}, ("sound.wav", np.random.default_rng(1).bytes(5000)), "file"),
    ({"language": "xx"}, file_of(SOUND), "language"),
    ({"response_format": "xml"}, file_of(SOUND), "response_format"),
    ({"temperature": "warm"}, file_of(SOUND), "temperature"),
    ({"temperature": "-1"}, file_of(SOUND), "temperature"),
    (
        {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        file_of(SOUND),
        "timestamp_granularities",
    ),
    ({"timestamp_granularities[]": "segment"}, file_of(SOUND), "timestamp_granularities"),
    ({"stream": "true", "response_format": "srt"}, file_of(SOUND), "stream"),
    ({"max_completion_tokens": "0"}, file_of(SOUND), "max_completion_tokens"),
    ({"prompt": "a " * 200, "language": "en"}, file_of(SOUND), "prompt"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_cannot_be_served_is_refused_with_its_field(number: int, server: ServerProcess) -> None:
    data, file, field = WRONG[number]
    for route in ("transcriptions", "translations"):
        answer = post(server, data, file, route)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field, answer.text


def test_a_form_without_a_file_and_an_unknown_model_are_refused(server: ServerProcess) -> None:
    answer = post(server, {"language": "en"}, None)
    assert answer.status_code == 400
    answer = post(server, {"model": "other"}, file_of(SOUND))
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
