"""Sounds in `/v1/chat/completions`, as OpenAI's client sends them, and in `LLM.chat`: a server with a tiny model that hears."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from safetensors.torch import save
from tests.oracles.media_server import MediaServer, answer, redirect
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_encoder_decoder import RATE, draw_sound
from tests.oracles.tiny_listeners import AUDIO, HearingOracle, make_tiny_listener

from quire import LLM, SamplingParams
from quire.errors import RequestError

SOUND = (draw_sound(5, 7000) * 32767).astype(np.int16)
ARCHITECTURE = "Qwen2AudioForConditionalGeneration"
EXTRA = {"return_token_ids": True, "ignore_eos": True}


def as_file(samples: Any, rate: int = RATE, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


def input_audio(data: bytes | str, kind: str = "wav") -> dict[str, Any]:
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": kind}}


def audio_url(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def message(*parts: Any) -> list[Any]:
    given = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": given}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_listener(ARCHITECTURE, tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def files() -> Iterator[MediaServer]:
    served = {"/one.flac": answer(as_file(SOUND, kind="FLAC")), "/private": redirect("http://10.0.0.1/one.flac")}
    with MediaServer(served) as server:
        yield server


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opened")
    (folder / "one.wav").write_bytes(as_file(SOUND))
    return folder


@pytest.fixture(scope="module")
def server_url(folder: Path, opened: Path) -> Iterator[str]:
    flags = ["--model", str(folder), "--port", "0", "--max-model-len", "256", "--cpu-threads", "1"]
    flags += ["--kv-cache-memory-bytes", "16M", "--limit-mm-per-prompt", '{"audio": 2}']
    flags += ["--allowed-local-media-path", str(opened), "--allowed-media-domains", "127.0.0.1", "--enable-mm-embeds"]
    server = ServerProcess(*SERVE, *flags)
    yield server.url
    server.kill()


@pytest.fixture(scope="module")
def client(server_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(model=str(folder), max_model_len=256, num_gpu_blocks_override=60, max_num_seqs=4)


def ask(client: openai.OpenAI, *parts: Any, max_tokens: int = 6) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(
        model=model, messages=message(*parts), max_tokens=max_tokens, temperature=0, extra_body=EXTRA
    )


def test_a_client_gets_what_transformers_answers_to_a_sound(client: openai.OpenAI, folder: Path) -> None:
    answer = ask(client, "Hear", input_audio(as_file(SOUND)), "and tell")
    prompt, token_ids = list(answer.prompt_token_ids), list(answer.choices[0].token_ids)
    assert prompt.count(AUDIO) == 11 and answer.usage.prompt_tokens == len(prompt)
    logprobs = HearingOracle(folder).logprobs(prompt + token_ids, [SOUND / np.float32(32768)])[len(prompt) - 1 : -1]
    assert token_ids == logprobs.argmax(-1).tolist()


def test_responses_hear_what_chat_completions_hear(client: openai.OpenAI) -> None:
    data = input_audio(as_file(SOUND))
    given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hear"}, data]}]
    options = {"temperature": 0, "max_output_tokens": 6, "extra_body": {"ignore_eos": True}}
    answer = client.responses.create(model=client.models.list().data[0].id, input=given, **options)
    assert answer.output_text == ask(client, "Hear", data).choices[0].message.content
    with pytest.raises(openai.BadRequestError) as caught:
        given[0]["content"][1] = {"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}
        client.responses.create(model="", input=given)
    assert caught.value.param == "input[0].content[1].input_audio"


def test_a_sound_may_be_its_embeddings(client: openai.OpenAI, folder: Path) -> None:
    rows = torch.linspace(-1, 1, 11 * 64).reshape(11, 64)
    part = {"type": "audio_embeds", "audio_embeds": base64.b64encode(save({"rows": rows})).decode()}
    answer = ask(client, "Hear", part, "and tell")
    assert list(answer.prompt_token_ids).count(AUDIO) == 11
    request: Any = {"prompt_token_ids": list(answer.prompt_token_ids)}
    first = request["prompt_token_ids"].index(AUDIO)
    request["prompt_token_ids"][first : first + 11] = [AUDIO]
    llm = LLM(model=str(folder), max_model_len=256, num_gpu_blocks_override=60, max_num_seqs=4, enable_mm_embeds=True)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate(request | {"multi_modal_data": {"audio": {"audio_embeds": rows}}}, params, use_tqdm=False)
    assert list(answer.choices[0].token_ids) == list(output.outputs[0].token_ids)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, {"type": "audio_embeds", "audio_embeds": "?"})
    assert caught.value.param == "messages[0].content[0].audio_embeds"


def test_a_sound_is_the_same_wherever_it_comes_from(
    client: openai.OpenAI, files: MediaServer, opened: Path, llm: LLM
) -> None:
    data_url = "data:audio/wav;base64," + base64.b64encode(as_file(SOUND)).decode()
    urls = [data_url, f"{files.url}/one.flac", (opened / "one.wav").as_uri()]
    parts = [input_audio(as_file(SOUND)), input_audio(as_file(SOUND, kind="FLAC"), "flac"), *map(audio_url, urls)]
    token_ids = [list(ask(client, "Hear", part).choices[0].token_ids) for part in parts]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    held = {"type": "audio", "audio": (SOUND / np.float32(32768), RATE)}
    outputs = [llm.chat(message("Hear", part), params, use_tqdm=False)[0] for part in (held, parts[0], parts[2])]
    token_ids += [list(output.outputs[0].token_ids) for output in outputs]
    assert len(set(map(tuple, token_ids))) == 1


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (input_audio("@@@@"), "its base64 cannot be decoded"),
        (input_audio(b"hello"), "cannot be read as sound"),
        (input_audio(as_file(SOUND)[:20]), "cannot be read as sound"),
        (input_audio(as_file(SOUND)[:44]), "is empty"),
        (input_audio(as_file(SOUND[:100])), "is too short"),
        (input_audio(as_file(SOUND, 100)), "100 samples a second"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "expected data, base64 of a file"),
        ({"type": "input_audio", "input_audio": 7}, "expected data, base64 of a file"),
        (audio_url("data:image/png;base64,aGVsbG8="), "is no data URL of an audio"),
        (audio_url("ftp://example.org/cat.wav"), "is not supported; give an audio as data:"),
        (audio_url("http://localhost/cat.wav"), "'localhost' is not one of the server's --allowed-media-domains"),
        (audio_url("file:///etc/passwd"), "no such file below the server's --allowed-local-media-path"),
    ],
)
def test_a_broken_sound_is_a_400_with_the_path_of_its_part(
    client: openai.OpenAI, part: dict[str, Any], why: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        ask(client, "Hear", part)
    assert caught.value.param == f"messages[0].content[1].{part['type']}"


def test_silent_slow_and_torn_sounds_are_heard(client: openai.OpenAI) -> None:
    slow = draw_sound(5, 3500)
    sounds = {
        "silent": (as_file(np.zeros(7000, np.float32)), 11),
        "8 kHz": (as_file(slow, 8000), 11),
        "two channels": (as_file(np.stack([SOUND, SOUND], axis=1)), 11),
        "torn": (as_file(SOUND)[:-7000], 5),
    }
    for name, (data, count) in sounds.items():
        answer = ask(client, "Hear", input_audio(data), max_tokens=1)
        assert (name, list(answer.prompt_token_ids).count(AUDIO)) == (name, count)


def test_more_sounds_than_allowed_and_images_are_refused(client: openai.OpenAI, llm: LLM) -> None:
    part = input_audio(as_file(SOUND))
    with pytest.raises(openai.BadRequestError, match="the prompt has 3 sounds; limit_mm_per_prompt allows 2"):
        ask(client, part, part, part)
    with pytest.raises(openai.BadRequestError, match="'image_url' content is not supported by this model"):
        ask(client, {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}})
    with pytest.raises(RequestError, match="is a dict with 'audio'; this one has 'image'"):
        llm.generate({"prompt": "<|AUDIO|>", "multi_modal_data": {"image": np.zeros((4, 4, 3), np.uint8)}})


def test_words_that_look_like_a_marker_make_no_place_for_a_sound(client: openai.OpenAI) -> None:
    answer = ask(client, "<|AUDIO|> is", input_audio(as_file(SOUND)), max_tokens=1)
    assert list(answer.prompt_token_ids).count(AUDIO) == 11


def test_a_sound_may_be_named_and_then_left_out(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

    def tell(given: Any, name: str | None) -> list[int]:
        request: Any = {"prompt": "<|AUDIO|>x", "multi_modal_data": {"audio": [given]}}
        request["multi_modal_uuids"] = {"audio": [name]}
        return list(llm.generate(request, params, use_tqdm=False)[0].outputs[0].token_ids)

    sound = SOUND / np.float32(32768)
    assert tell(sound, "first") == tell(None, "first") == tell((sound, RATE), None) == tell(sound.tolist(), None)
    with pytest.raises(RequestError, match="'second' is not known"):
        tell(None, "second")
