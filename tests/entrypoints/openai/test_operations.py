"""The routes of those who run a server, and `/invocations`."""

import json
import shutil

import pytest
from tests.entrypoints.openai.test_pooling_routes import start
from tests.oracles.fake_async_llm import FakeAsyncLLM, engine_config
from tests.oracles.tiny_models import make_tiny_model

from quire.entrypoints.server.operations import OPERATIONS
from quire.entrypoints.server.routes import WORK
from quire.errors import EngineDeadError

pytestmark = pytest.mark.anyio


async def test_live_is_true_until_the_engine_dies(server):
    async with server(ready=False) as s:
        assert (await s.client.get("/live")).status_code == 200
        assert (await s.client.get("/health")).status_code == 503
    async with server(api_keys=["secret"]) as s:
        assert (await s.client.get("/live")).status_code == 200
        s.engine.failure = EngineDeadError("the core is started again")
        assert (await s.client.get("/live")).status_code == 200
        assert (await s.client.get("/health")).status_code == 503
        s.engine.errored = True
        assert (await s.client.get("/live")).status_code == 503


async def test_the_prefix_cache_can_be_forgotten(server):
    async with server() as s:
        response = await s.client.post("/reset_prefix_cache")
        assert response.json() == {"success": True} and s.engine.resets == 1
    async with server(ready=False) as s:
        assert (await s.client.post("/reset_prefix_cache")).status_code == 503


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_profiles_need_a_setting_that_the_error_names(path, server):
    async with server() as s:
        response = await s.client.post(path)
        assert response.status_code == 400 and response.json()["error"]["code"] == "profiler_off"
        assert "--profiler-config" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_adapters_need_a_setting_that_the_error_names(path, server):
    async with server() as s:
        response = await s.client.post(path, json={})
        assert response.status_code == 400 and response.json()["error"]["code"] == "adapters_off"
        assert "--enable-lora" in response.json()["error"]["message"]


async def test_tokenizer_info_tells_the_tokenizer_and_its_template(server, tmp_path):
    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    engine = start(path)
    try:
        async with server(engine) as s:
            info = (await s.client.get("/tokenizer_info")).json()
    finally:
        engine.shutdown()
    tokenizer = engine.get_tokenizer()
    assert info["chat_template"] == tokenizer.chat_template and info["vocab_size"] == len(tokenizer)
    assert info["eos_token"] == tokenizer.eos_token and info["added_tokens"] == tokenizer.get_added_vocab()
    async with server(FakeAsyncLLM(engine_config(skip_tokenizer_init=True))) as s:
        assert (await s.client.get("/tokenizer_info")).status_code == 400
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "ab", "max_tokens": 3}),
        ("/v1/completions", {"prompt": "ab", "max_tokens": 3, "stream": True}),
        ("/v1/completions", {"prompt": "ab", "max_tokens": "3"}),
        ("/v1/embeddings", {"input": "ab"}),
        ("/score", {"queries": "ab", "documents": ["c"]}),
        ("/rerank", {"query": "ab", "documents": ["c"]}),
    ],
)
async def test_an_invocation_is_what_its_fields_say(path, body, server):
    def comparable(response):
        text = response.text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] or [text]
        bodies = [json.loads(line) for line in lines]
        return response.status_code, [{k: v for k, v in b.items() if k not in ("id", "created")} for b in bodies]

    async with server() as s:
        direct, invoked = await s.client.post(path, json=body), await s.client.post("/invocations", json=body)
        assert comparable(direct) == comparable(invoked)


@pytest.mark.parametrize("content", [b"{}", b"", b"[1]", b"x", b'{"temperature": 1}'])
async def test_an_invocation_of_nothing_known_is_a_400(content, server):
    async with server() as s:
        response = await s.client.post("/invocations", content=content)
        assert response.status_code == 400 and set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_every_route_is_in_the_openapi_page_and_no_other(server):
    async with server() as s:
        described = (await s.client.get("/openapi.json")).json()["paths"]
    posted = {(endpoint.path, "post") for endpoint in WORK}
    others = {(each.path.replace(":path", ""), method.lower()) for each in OPERATIONS for method in each.methods}
    assert posted | others == {(path, method) for path, operations in described.items() for method in operations}


async def test_a_405_tells_every_method_of_the_path(server):
    async with server() as s:
        for path, methods in (("/v1/responses/resp_x", "DELETE, GET, HEAD"), ("/ping", "GET, HEAD, POST")):
            refused = await s.client.put(path)
            assert refused.status_code == 405
            assert ", ".join(sorted(refused.headers["allow"].split(", "))) == methods
