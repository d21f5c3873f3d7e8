"""Images in `/v1/chat/completions`, as OpenAI's client sends them, and in `LLM.chat`: a server with a tiny model that sees."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from tests.oracles.media_server import MediaServer, answer, redirect
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_vision import IMAGE, VisionOracle, draw_image, make_tiny_vision

from quire import LLM, SamplingParams
from quire.errors import RequestError

PIXELS = draw_image(5, 40, 31)
ARCHITECTURE = "LlavaForConditionalGeneration"


def data_url(pixels: Any, kind: str = "png") -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return f"data:image/{kind};base64," + base64.b64encode(file.getvalue()).decode()


def message(*parts: Any) -> list[Any]:
    given = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": given}]


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(ARCHITECTURE, tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def files() -> Iterator[MediaServer]:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "png")
    served = {
        "/one.png": answer(file.getvalue()),
        "/moved": redirect("/one.png"),
        "/private": redirect("http://10.0.0.1/one.png"),
        "/gone": answer(b"", "404 Not Found"),
    }
    with MediaServer(served) as server:
        yield server


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opened")
    Image.fromarray(PIXELS).save(folder / "one.png")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path, opened: Path) -> Iterator[openai.OpenAI]:
    flags = ["--model", str(folder), "--port", "0", "--max-model-len", "256", "--cpu-threads", "1"]
    server = ServerProcess(
        *SERVE,
        *flags,
        "--kv-cache-memory-bytes",
        "16M",
        "--limit-mm-per-prompt",
        '{"image": 2}',
        "--allowed-local-media-path",
        str(opened),
        "--allowed-media-domains",
        "127.0.0.1",
        "files.test",
    )
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.kill()


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(model=str(folder), max_model_len=256, num_gpu_blocks_override=60, max_num_seqs=4)


def test_a_client_gets_what_transformers_answers_to_an_image(client: openai.OpenAI, folder: Path) -> None:
    model = client.models.list().data[0].id
    extra = {"return_token_ids": True, "ignore_eos": True}
    messages = message("See", image_part(data_url(PIXELS)), "and tell")
    answer: Any = client.chat.completions.create(
        model=model, messages=messages, max_tokens=6, temperature=0, extra_body=extra
    )
    prompt, token_ids = list(answer.prompt_token_ids), list(answer.choices[0].token_ids)
    assert prompt.count(IMAGE) == 16 and answer.usage.prompt_tokens == len(prompt)
    logprobs = VisionOracle(folder).logprobs(prompt + token_ids, [PIXELS])[len(prompt) - 1 : -1]
    assert token_ids == logprobs.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64,@@@@", "its base64 cannot be decoded"),
        ("data:image/png;base64,aGVsbG8=", "the image cannot be decoded"),
        ("data:image/png,abc", "the data URL is not base64"),
        ("ftp://example.org/cat.png", "is not supported; give an image as data:"),
        ("http://localhost/cat.png", "'localhost' is not one of the server's --allowed-media-domains"),
        ("file:///etc/passwd", "no such file below the server's --allowed-local-media-path"),
        (data_url(PIXELS)[:-400], "cannot be decoded"),
    ],
)
def test_a_broken_image_is_a_400_with_the_path_of_its_part(client: openai.OpenAI, url: str, why: str) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        client.chat.completions.create(model=model, messages=message("See", image_part(url)), max_tokens=1)
    assert caught.value.param == "messages[0].content[1].image_url"


def test_images_behind_urls_are_the_same_as_in_the_message(
    client: openai.OpenAI, files: MediaServer, opened: Path
) -> None:
    model = client.models.list().data[0].id

    def ask(url: str) -> Any:
        messages, extra = message("See", image_part(url)), {"return_token_ids": True, "ignore_eos": True}
        answer: Any = client.chat.completions.create(
            model=model, messages=messages, max_tokens=6, temperature=0, extra_body=extra
        )
        return answer.prompt_token_ids, answer.choices[0].token_ids

    urls = [data_url(PIXELS), f"{files.url}/one.png", f"{files.url}/moved", f"file://{opened}/one.png"]
    first, *others = map(ask, urls)
    assert first[0].count(IMAGE) == 16 and others == [first] * 3
    for path, why in {"/private": "allowed-media-domains", "/gone": "answers with status 404"}.items():
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            ask(files.url + path)
        assert caught.value.param == "messages[0].content[1].image_url"


def test_more_images_than_allowed_are_refused(client: openai.OpenAI) -> None:
    model, part = client.models.list().data[0].id, image_part(data_url(PIXELS))
    with pytest.raises(openai.BadRequestError, match="limit_mm_per_prompt allows 2"):
        client.chat.completions.create(model=model, messages=message(part, part, part), max_tokens=1)


def test_a_marker_that_a_user_types_is_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    part = {"type": "image", "image": Image.fromarray(PIXELS)}
    (output,) = llm.chat(message("a <image> b", part, "<image>"), params, use_tqdm=False)
    assert list(output.prompt_token_ids or ()).count(IMAGE) == 16
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode([t for t in output.prompt_token_ids or () if t != IMAGE]).count("<image>") == 2
    assert (output.prompt or "").count("<image>") == 3
    (typed,) = llm.chat(message("only <image> typed"), params, use_tqdm=False)
    assert IMAGE not in list(typed.prompt_token_ids or ())


def test_a_prompt_with_another_number_of_markers_than_images_is_refused(llm: LLM) -> None:
    for prompt in ("none", "<image> and <image>"):
        with pytest.raises(RequestError, match="places for images"):
            llm.generate({"prompt": prompt, "multi_modal_data": {"image": PIXELS}}, use_tqdm=False)


def test_pillow_images_arrays_and_tensors_are_the_same_image(llm: LLM) -> None:
    import torch

    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    tensor = torch.from_numpy(PIXELS.copy()).permute(2, 0, 1)
    forms = [Image.fromarray(PIXELS), PIXELS, tensor, [PIXELS]]
    prompts = [{"prompt": "x<image>y", "multi_modal_data": {"image": form}} for form in forms]
    processor = llm.llm_engine.input_processor.media
    assert processor is not None
    hits = processor.cache.num_hits
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert processor.cache.num_hits - hits >= 3


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"image": PIXELS.astype("float32")}, "its numbers are float32"),
        ({"image": "cat.png"}, "it is a str"),
        ({"image": PIXELS[:, :, :2]}, "its shape is"),
        ({"sound": PIXELS}, "this one has 'sound'"),
    ],
)
def test_what_is_no_image_is_refused_in_words(llm: LLM, given: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        llm.generate({"prompt": "<image>", "multi_modal_data": given}, use_tqdm=False)
