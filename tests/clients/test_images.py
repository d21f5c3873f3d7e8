"""Clients show images in every form that they have: the model's answer and the prompt's length are those of the plain request.
Those of OpenAI and Anthropic themselves are tested in `entrypoints/openai/test_image_parts.py`.

A client that is not installed beside Quire may live in other environments, as in `test_documented`.
"""

import base64
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.clients.test_documented import interpreter_for
from tests.oracles.media_server import MediaServer, answer
from tests.oracles.odd_images import file_of
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_vision import draw_image, make_tiny_vision

HEAD = """
import json, sys
url, model, link, data = sys.argv[1:]
inline = "data:image/png;base64," + data
text = {"type": "text", "text": "See"}
def show(content, tokens):
    print(json.dumps([content or "", tokens]))
"""
SCRIPTS = {
    "langchain-openai": """
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
forms = [
    {"type": "image_url", "image_url": {"url": inline}},
    {"type": "image_url", "image_url": {"url": link}},
    {"type": "image", "base64": data, "mime_type": "image/png"},
    {"type": "image", "url": link},
    {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"},
    {"type": "image", "source_type": "url", "url": link},
]
for in_responses in (False, True):
    chat = ChatOpenAI(model=model, base_url=url + "/v1", api_key="none", temperature=0, max_tokens=8,
                      use_responses_api=in_responses)
    for part in forms:
        got = chat.invoke([HumanMessage(content=[text, part])])
        show(got.text, got.usage_metadata["input_tokens"])
""",
    "litellm": """
import litellm
forms = [
    {"type": "image_url", "image_url": {"url": inline, "format": "image/png"}},
    {"type": "image_url", "image_url": inline},
    {"type": "image_url", "image_url": {"url": link}},
    {"type": "image_url", "image_url": link},
]
for provider, base in (("hosted_vllm", "/v1"), ("openai", "/v1"), ("anthropic", "")):
    for part in forms if base else forms[:2]:  # for Anthropic's protocol it fetches links itself
        got = litellm.completion(
            model=f"{provider}/{model}", api_base=url + base, api_key="none", temperature=0, max_tokens=8,
            messages=[{"role": "user", "content": [text, part]}])
        show(got.choices[0].message.content, got.usage.prompt_tokens)
""",
}


@pytest.fixture(scope="module")
def link() -> Iterator[str]:
    image = file_of(Image.fromarray(draw_image(5, 40, 31)))
    with MediaServer({"/one.png": answer(image, Content_Type="image/png")}) as server:
        yield f"{server.url}/one.png"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_tiny_vision("LlavaForConditionalGeneration", tmp_path_factory.mktemp("vision"))
    flags = ["--model", str(folder), "--port", "0", "--max-model-len", "256", "--cpu-threads", "1"]
    flags += ["--kv-cache-memory-bytes", "16M", "--allowed-media-domains", "127.0.0.1", "--served-model-name", "sees"]
    server = ServerProcess(*SERVE, *flags, "--no-enable-prefix-caching")
    yield server.url
    server.kill()


def plain(url: str, link: str) -> list[Any]:
    parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": link}}]
    asked = {"model": "sees", "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}
    got = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()
    return [got["choices"][0]["message"]["content"], got["usage"]["prompt_tokens"]]


@pytest.mark.parametrize("package", SCRIPTS)
def test_every_form_of_an_image_shows_the_same(package: str, url: str, link: str) -> None:
    python, data = interpreter_for([package]), httpx.get(link).content
    command = [python, "-c", HEAD + SCRIPTS[package], url, "sees", link, base64.b64encode(data).decode()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(seen) >= 2 and seen == [plain(url, link)] * len(seen)
