"""Images beside a prompt in `/v1/chat/completions`, as OpenAI's client sends them: a server with a tiny Donut."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.entrypoints.openai.test_image_parts import data_url, image_part, message
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_encoder_decoder import EncoderDecoderOracle, make_tiny_encoder_decoder
from tests.oracles.tiny_vision import draw_image

PIXELS = draw_image(5, 44, 36)
TEMPLATE = "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder_decoder("VisionEncoderDecoderModel", tmp_path_factory.mktemp("donut"))


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = tmp_path_factory.mktemp("template") / "text.jinja"
    template.write_text(TEMPLATE)
    flags = ["--model", str(folder), "--port", "0", "--cpu-threads", "1", "--kv-cache-memory-bytes", "16M"]
    server = ServerProcess(*SERVE, *flags, "--chat-template", str(template))
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.kill()


def ask(client: openai.OpenAI, *parts: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True}
    model = client.models.list().data[0].id
    return client.chat.completions.create(
        model=model, messages=message(*parts), max_tokens=6, temperature=0, extra_body=extra
    )


def test_a_messages_image_stands_beside_its_text(client: openai.OpenAI, folder: Path) -> None:
    answer: Any = ask(client, image_part(data_url(PIXELS)), "the quick")
    ids, own = answer.prompt_token_ids, answer.choices[0].token_ids
    expected = EncoderDecoderOracle(folder).logprobs([*ids, *own], image=PIXELS)[len(ids) - 1 : -1]
    assert ids and own == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("parts", "param", "message"),
    [
        (["the quick"], "multi_modal_data", "the model's encoder sees"),
        ([image_part(data_url(PIXELS)), image_part(data_url(PIXELS)), "a"], "multi_modal_data", "one image, not 2"),
        ([image_part("data:image/png;base64,AAAA"), "a"], "messages[0].content[0].image_url", "image"),
    ],
)
def test_a_message_that_cannot_be_served_is_refused(
    client: openai.OpenAI, parts: list[Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as error:
        ask(client, *parts)
    assert error.value.param == param


def test_a_completion_has_no_image(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the model's encoder sees"):
        client.completions.create(model=client.models.list().data[0].id, prompt="a")
