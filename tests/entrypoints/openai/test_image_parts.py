"""Images in `/v1/chat/completions`, as OpenAI's client sends them, and in `LLM.chat`: a server with a tiny model that sees."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
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
def server_url(folder: Path, opened: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--model", str(folder), "--port", "0", "--max-model-len", "256", "--cpu-threads", "1"]
    flags += ["--kv-cache-memory-bytes", "16M", "--limit-mm-per-prompt", '{"image": 2}', "--trust-request-mm-kwargs"]
    flags += ["--enable-prompt-tokens-details"]
    flags += ["--allowed-local-media-path", str(opened), "--allowed-media-domains", "127.0.0.1", "files.test"]
    server = ServerProcess(*SERVE, *flags, "--batch-store", str(tmp_path_factory.mktemp("batches")))
    yield server.url
    server.kill()


@pytest.fixture(scope="module")
def client(server_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0)


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
        ({"image": {"path": "cat.png"}}, "it is a dict"),
        ({"image": PIXELS[:, :, :2]}, "its shape is"),
        ({"sound": PIXELS}, "this one has 'sound'"),
    ],
)
def test_what_is_no_image_is_refused_in_words(llm: LLM, given: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        llm.generate({"prompt": "<image>", "multi_modal_data": given}, use_tqdm=False)


def test_every_protocol_shows_the_same_image(client: openai.OpenAI, server_url: str, files: MediaServer) -> None:
    """The same prompt in all of them: a text, an image in the message, an image behind a URL. What is not the first time finds
    its pages, whose names depend on the images."""
    model, data, link = client.models.list().data[0].id, data_url(PIXELS), f"{files.url}/one.png"
    chat: Any = [{"role": "user", "content": [{"type": "text", "text": "See"}, image_part(data), image_part(link)]}]
    first: Any = client.chat.completions.create(
        model=model, messages=chat, max_tokens=6, extra_body={"return_token_ids": True}
    )
    prompt = list(first.prompt_token_ids)
    assert prompt.count(IMAGE) == 32 and first.usage.prompt_tokens == len(prompt)
    seen = []

    parts: list[Any] = [{"type": "input_text", "text": "See"}]
    parts += [{"type": "input_image", "image_url": each, "detail": "auto"} for each in (data, link)]
    asked: Any = [{"role": "user", "content": parts}]
    for options in ({}, {"truncation": "auto"}):
        answer: Any = client.responses.create(model=model, input=asked, max_output_tokens=16, **options)
        seen.append((answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens))
    followed: Any = client.responses.create(
        model=model, previous_response_id=answer.id, input="Again?", max_output_tokens=16
    )
    assert followed.usage.input_tokens > len(prompt)
    assert followed.usage.input_tokens_details.cached_tokens >= seen[0][1]

    other = anthropic.Anthropic(base_url=server_url, api_key="none", max_retries=0)
    encoded = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
    blocks: list[Any] = [{"type": "text", "text": "See"}, {"type": "image", "source": encoded}]
    turn: Any = {"role": "user", "content": [*blocks, {"type": "image", "source": {"type": "url", "url": link}}]}
    usage: Any = other.messages.create(model=model, messages=[turn], max_tokens=6).usage
    seen.append((usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens))
    assert other.messages.count_tokens(model=model, messages=[turn]).input_tokens == len(prompt)

    tokenized: Any = client.post(f"{server_url}/tokenize", body={"messages": chat}, cast_to=object)
    assert tokenized["tokens"] == prompt and tokenized["count"] == len(prompt)
    usage = batch_of(client, {"model": model, "messages": chat, "max_tokens": 6})["usage"]
    seen.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    assert seen == [(len(prompt), len(prompt) // 16 * 16)] * 4


def batch_of(client: openai.OpenAI, body: dict[str, Any]) -> dict[str, Any]:
    """What a batch of one chat answers."""
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while (found := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired", "cancelled"):
        pass
    assert found.output_file_id is not None, found
    return json.loads(client.files.content(found.output_file_id).text)["response"]["body"]


def test_errors_name_the_part_as_each_protocol_writes_it(client: openai.OpenAI, server_url: str) -> None:
    model, broken = client.models.list().data[0].id, "data:image/png;base64,aGVsbG8="
    with pytest.raises(openai.BadRequestError, match="cannot be decoded") as caught:
        part: Any = {"type": "input_image", "image_url": broken}
        client.responses.create(model=model, input=[{"role": "user", "content": [part]}])
    assert caught.value.param == "input[0].content[0].image_url"
    other = anthropic.Anthropic(base_url=server_url, api_key="none", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    content: Any = [{"type": "text", "text": "a"}, {"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]\.source: the image cannot"):
        other.messages.create(model=model, messages=[{"role": "user", "content": content}], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="one side may be at most 200 times") as caught:
        line = data_url(PIXELS[:1].repeat(250, axis=1))
        client.chat.completions.create(
            model=model, messages=message("a", image_part(data_url(PIXELS)), image_part(line))
        )
    assert caught.value.param == "messages[0].content[2].image_url"


def test_an_image_that_has_a_name_need_not_be_sent_again(client: openai.OpenAI) -> None:
    model, name = client.models.list().data[0].id, {"uuid": "a-name"}

    def ask(part: dict[str, Any], **extra: Any) -> Any:
        answer: Any = client.chat.completions.create(
            model=model, messages=message("See", part), max_tokens=6, temperature=0, extra_body={**extra}
        )
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    sent = ask(image_part(data_url(PIXELS)) | name)
    assert ask({"type": "image_url", "image_url": None} | name) == ask({"type": "image_url"} | name) == sent
    with pytest.raises(openai.BadRequestError, match="its uuid 'another' is not known") as caught:
        ask({"type": "image_url", "uuid": "another"})
    assert caught.value.param == "messages[0].content[1].image_url"


def test_options_of_the_processor_are_the_requests_where_the_operator_allows_it(client: openai.OpenAI) -> None:
    model, logprobs = client.models.list().data[0].id, []
    for options in (None, {}, {"image_mean": [0.0, 0.0, 0.0]}):
        answer = client.chat.completions.create(
            model=model,
            messages=message("See", image_part(data_url(PIXELS))),
            max_tokens=1,
            temperature=0,
            logprobs=True,
            extra_body={"mm_processor_kwargs": options},
        )
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
        logprobs.append(answer.choices[0].logprobs.content[0].logprob)
    assert logprobs[0] == logprobs[1] != logprobs[2]
    with pytest.raises(openai.BadRequestError, match="cannot be processed"):
        client.chat.completions.create(
            model=model,
            messages=message(image_part(data_url(PIXELS))),
            extra_body={"mm_processor_kwargs": {"size": {"height": "tall"}}},
        )
