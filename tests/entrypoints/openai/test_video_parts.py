"""Videos in `/v1/chat/completions`, as vLLM's clients send them, and in `LLM.chat`: a server with a tiny model that sees."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from tests.oracles.film_files import FORMATS, bad_films, film_file, grey_frames, spoilt_film
from tests.oracles.media_server import MediaServer, answer, redirect
from tests.oracles.odd_images import file_of
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_video import VIDEO
from tests.oracles.tiny_vision import make_tiny_vision

from quire import LLM, SamplingParams
from quire.errors import RequestError

FRAMES = grey_frames(40, 32, 32)
FILM = film_file(FRAMES, rate=10)
EXTRA = {"return_token_ids": True, "ignore_eos": True}
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def data_url(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def video_part(url: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def message(*parts: Any) -> list[Any]:
    given = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": given}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision("Qwen2_5_VLForConditionalGeneration", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def files() -> Iterator[MediaServer]:
    served = {"/film.mp4": answer(FILM), "/private": redirect("http://10.0.0.1/film.mp4"), "/text": answer(b"<html>")}
    with MediaServer(served) as server:
        yield server


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opened")
    (folder / "film.mp4").write_bytes(FILM)
    return folder


@pytest.fixture(scope="module")
def server_url(folder: Path, opened: Path) -> Iterator[str]:
    flags = ["--model", str(folder), "--port", "0", "--max-model-len", "512", "--cpu-threads", "1"]
    flags += ["--kv-cache-memory-bytes", "32M", "--limit-mm-per-prompt", '{"video": 2}']
    flags += ["--media-io-kwargs", '{"video": {"num_frames": 6}}']
    flags += ["--allowed-local-media-path", str(opened), "--allowed-media-domains", "127.0.0.1"]
    server = ServerProcess(*SERVE, *flags)
    yield server.url
    server.kill()


@pytest.fixture(scope="module")
def client(server_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    reading = {"video": {"num_frames": 6}}
    return LLM(
        model=str(folder), max_model_len=512, num_gpu_blocks_override=200, max_num_seqs=4, media_io_kwargs=reading
    )


def ask(client: openai.OpenAI, *parts: Any, max_tokens: int = 4, **extra: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(
        model=model, messages=message(*parts), max_tokens=max_tokens, temperature=0, extra_body=EXTRA | extra
    )


def test_a_video_is_the_same_wherever_it_comes_from(
    client: openai.OpenAI, files: MediaServer, opened: Path, llm: LLM
) -> None:
    urls = [data_url(FILM), data_url(FILM, "video/anything"), f"{files.url}/film.mp4", (opened / "film.mp4").as_uri()]
    answers = [ask(client, "See", video_part(url)) for url in urls]
    assert [list(answer.prompt_token_ids).count(VIDEO) for answer in answers] == [3 * 16] * 4
    token_ids = [list(answer.choices[0].token_ids) for answer in answers]
    parts: list[Any] = [video_part(urls[0]), {"type": "video_url", "video_url": urls[0]}]
    parts.append({"type": "video", "video": opened / "film.mp4"})
    token_ids += [
        list(llm.chat(message("See", part), PARAMS, use_tqdm=False)[0].outputs[0].token_ids) for part in parts
    ]
    assert len(set(map(tuple, token_ids))) == 1


def test_a_request_says_which_frames_are_read(client: openai.OpenAI) -> None:
    part = video_part(data_url(FILM))
    for options, count in (({"num_frames": 2}, 1), ({"num_frames": -1, "fps": 2}, 4), ({}, 3)):
        answer = ask(client, part, max_tokens=1, media_io_kwargs={"video": options})
        assert list(answer.prompt_token_ids).count(VIDEO) == count * 16
    with pytest.raises(openai.BadRequestError, match=r"media_io_kwargs: video\.num_frames=0 must be"):
        ask(client, part, media_io_kwargs={"video": {"num_frames": 0}})
    with pytest.raises(openai.BadRequestError, match="trust-request-mm-kwargs"):
        ask(client, part, mm_processor_kwargs={"num_frames": 2})


def test_videos_and_images_stand_in_one_conversation(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(file_of(Image.fromarray(FRAMES[0])), "image/png")}}
    video = video_part(data_url(FILM))
    answer = ask(client, "One", video, image, "and", video)
    assert list(answer.prompt_token_ids).count(VIDEO) == 2 * 3 * 16 and len(answer.choices[0].token_ids) == 4
    pictures = data_url(file_of(Image.fromarray(FRAMES[0])), "video/jpeg")
    assert list(ask(client, video_part(pictures)).prompt_token_ids).count(VIDEO) == 16
    with pytest.raises(openai.BadRequestError, match="the prompt has 3 videos; limit_mm_per_prompt allows 2"):
        ask(client, video, video, video)


def bad_parts(files: MediaServer) -> list[tuple[Any, str]]:
    """What is to be refused, as parts of a message, and why."""
    parts = [(video_part(data_url(data)), "") for _, data in bad_films()]
    parts += [
        (video_part(data_url(FILM, "image/png")), "is no data URL of a video"),
        (video_part("data:video/mp4,abc"), "base64"),
    ]
    parts += [(video_part(url), "") for url in ("", "data:", "ftp://a/b", 3, None, [], {})]
    parts += [(video_part(f"{files.url}{path}"), "") for path in ("/private", "/text", "/gone")]
    parts += [
        (video_part("file:///etc/passwd"), "no such file"),
        (video_part("http://localhost/a.mp4"), "allowed-media-domains"),
    ]
    return parts + [
        ({"type": "video", "video": value}, "") for value in ("/etc/passwd", 3, [[[1]]], {"path": "/etc/passwd"})
    ]


def test_bad_videos_are_refused_by_name_and_disturb_nobody(client: openai.OpenAI, files: MediaServer) -> None:
    expected = ask(client, "Tell", max_tokens=40).choices[0].token_ids

    def refuse(given: tuple[Any, str]) -> None:
        part, why = given
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            ask(client, "See", part)
        assert (caught.value.param or "").startswith("messages[0].content[1]"), (part, caught.value)
        assert "root:" not in str(caught.value) and " at 0x" not in str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(ask, client, "Tell", max_tokens=40) for _ in range(4)]
        list(pool.map(refuse, bad_parts(files)))
    assert all(list(one.result().choices[0].token_ids) == list(expected) for one in beside)


def test_words_that_look_like_a_marker_make_no_place_for_a_video(client: openai.OpenAI, llm: LLM) -> None:
    marker = llm.llm_engine.input_processor.markers["video"]
    answer = ask(client, f"{marker} is", video_part(data_url(FILM)), max_tokens=1)
    assert list(answer.prompt_token_ids).count(VIDEO) == 3 * 16


def test_a_model_that_sees_no_videos_says_so(tmp_path: Path) -> None:
    llm = LLM(model=str(make_tiny_vision("LlavaForConditionalGeneration", tmp_path)), max_model_len=128)
    with pytest.raises(RequestError, match="is a dict with 'image'; this one has 'video'"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"video": FRAMES}}, PARAMS)
    with pytest.raises(RequestError, match="video_url"):
        llm.chat(message(video_part(data_url(FILM))), PARAMS)


@pytest.mark.parametrize("rounds", [pytest.param(1500, marks=pytest.mark.exhaustive)])
def test_spoilt_files_are_read_or_refused_and_memory_returns(
    server_url: str, client: openai.OpenAI, rounds: int
) -> None:
    files, memory = [film_file(FRAMES, kind) for kind in FORMATS], list[float]()
    http, model = httpx.Client(base_url=server_url, timeout=120), client.models.list().data[0].id

    def send(seed: int) -> int:
        messages = message("a", video_part(data_url(spoilt_film(files, seed))))
        got = http.post("/v1/chat/completions", json={"model": model, "messages": messages, "max_tokens": 1})
        if got.status_code != 200:
            error = got.json()["error"]
            assert got.status_code == 400 and error["param"] == "messages[0].content[1].video_url", (seed, error)
        return got.status_code

    with ThreadPoolExecutor(4) as pool:
        for half in range(2):
            statuses = set(pool.map(send, range(half * rounds, (half + 1) * rounds)))
            lines = http.get("/metrics").text.splitlines()
            memory.append(
                sum(float(line.split()[-1]) for line in lines if line.startswith("process_resident_memory_bytes"))
            )
    assert statuses == {200, 400}
    assert memory[1] < memory[0] + (64 << 20)
