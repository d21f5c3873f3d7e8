"""Transcription sessions of `/v1/realtime`: what a tiny model of Whisper writes of sound that comes in pieces, to OpenAI's client
and to one that speaks as vLLM's does.
"""

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_encoder_decoder import draw_sound, make_tiny_encoder_decoder
from websockets.asyncio.client import connect

soundfile = pytest.importorskip("soundfile")
RATE = 16000
SOUND = (draw_sound(12, 40000) * 32767).astype(np.int16)
SECONDS = 60
FORMATS = {"audio/pcm": ("PCM_16", 24000), "audio/pcmu": ("ULAW", 8000), "audio/pcma": ("ALAW", 8000)}
PLACE = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_encoder_decoder("WhisperForConditionalGeneration", tmp_path_factory.mktemp("whisper"))
    flags = ["--port", "0", "--model", str(folder), "--max-num-seqs", "4", "--num-gpu-blocks-override", "40"]
    process = ServerProcess(*SERVE, *flags, "--served-model-name", "writes")
    yield process
    process.kill()


def transcribe(server: ServerProcess, data: bytes, rate: int, subtype: str) -> str:
    """What the other route writes of a file with these bytes."""
    samples, _ = soundfile.read(
        io.BytesIO(data), samplerate=rate, channels=1, format="RAW", subtype=subtype, dtype="int16"
    )
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return client.audio.transcriptions.create(model="", file=("a.wav", file.getvalue()), language="de").text


def pieces(data: bytes, size: int = 7001) -> list[str]:
    return [base64.b64encode(data[start : start + size]).decode() for start in range(0, len(data), size)]


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_said_is_told_in_deltas(kind: str, server: ServerProcess) -> None:
    subtype, rate = FORMATS[kind]
    file = io.BytesIO()
    soundfile.write(file, SOUND, rate, format="RAW", subtype=subtype)
    data = file.getvalue()

    async def run() -> tuple[list[Any], Any]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            heard = {"format": {"type": kind}, "transcription": {"language": "de"}}
            update = {"type": "session.update", "session": {"type": "transcription", "audio": {"input": heard}}}
            events: list[Any] = [
                update,
                *({"type": "input_audio_buffer.append", "audio": each} for each in pieces(data)),
            ]
            for event in [*events, {"type": "input_audio_buffer.commit"}]:
                await connection.send(event)
            seen = [await asyncio.wait_for(connection.recv(), SECONDS)]
            while seen[-1].type not in (f"{PLACE}.completed", f"{PLACE}.failed", "error"):
                seen.append(await asyncio.wait_for(connection.recv(), SECONDS))
            await connection.send({"type": "response.create"})
            return seen, await asyncio.wait_for(connection.recv(), SECONDS)

    seen, refused = asyncio.run(run())
    expected = transcribe(server, data, rate, subtype)
    assert seen[0].session.type == "transcription" and seen[-1].type == f"{PLACE}.completed", seen[-1]
    (committed,) = [event for event in seen if event.type == "input_audio_buffer.committed"]
    deltas = [event for event in seen if event.type == f"{PLACE}.delta"]
    assert {event.item_id for event in deltas} == {committed.item_id}
    assert "".join(event.delta for event in deltas) == seen[-1].transcript and seen[-1].transcript.strip() == expected
    assert seen[-1].usage.seconds == pytest.approx(len(SOUND) / rate, abs=0.01)
    assert refused.type == "error" and refused.error.code == "not_supported"


def test_a_client_of_vllm_is_understood(server: ServerProcess) -> None:
    data = SOUND.astype("<i2").tobytes()

    async def run() -> list[Any]:
        seen: list[Any] = []
        async with connect(f"{server.url}/v1/realtime".replace("http", "ws")) as socket:
            seen.append(json.loads(await socket.recv()))
            given: list[Any] = [{"type": "session.update", "model": "writes"}, {"type": "input_audio_buffer.commit"}]
            given += [{"type": "input_audio_buffer.append", "audio": piece} for piece in pieces(data)]
            for event in [*given, {"type": "input_audio_buffer.commit", "final": True}]:
                await socket.send(json.dumps(event))
            while seen[-1]["type"] not in ("transcription.done", "error"):
                seen.append(json.loads(await asyncio.wait_for(socket.recv(), SECONDS)))
            await socket.send(json.dumps({"type": "session.update", "model": "other"}))
            seen.append(json.loads(await asyncio.wait_for(socket.recv(), SECONDS)))
        return seen

    created, *events, done, refused = asyncio.run(run())
    assert created["type"] == "session.created" and done["type"] == "transcription.done", done
    deltas = [event["delta"] for event in events if event["type"] == "transcription.delta"]
    assert deltas and "".join(deltas) == done["text"]
    assert refused["type"] == "error" and "'other' is not served here" in refused["error"]


def test_what_cannot_be_written_is_told_and_the_session_goes_on(server: ServerProcess) -> None:
    async def run() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        seen: list[Any] = []
        async with client.realtime.connect(model="writes") as connection:
            for language in ("xx", "fr"):
                heard = {"format": {"type": "audio/pcm", "rate": RATE}, "transcription": {"language": language}}
                session: Any = {"type": "transcription", "audio": {"input": heard}}
                await connection.send({"type": "session.update", "session": session})
                await connection.send({"type": "input_audio_buffer.append", "audio": pieces(SOUND.tobytes())[0]})
                await connection.send({"type": "input_audio_buffer.commit"})
                while not seen or seen[-1].type not in (f"{PLACE}.completed", f"{PLACE}.failed", "error"):
                    seen.append(await asyncio.wait_for(connection.recv(), SECONDS))
                if language == "xx":
                    failed = seen.pop()
                    seen = []
        return [failed, seen[-1]]

    failed, completed = asyncio.run(run())
    assert failed.type == f"{PLACE}.failed" and failed.error.param == "language"
    assert completed.type == f"{PLACE}.completed"
