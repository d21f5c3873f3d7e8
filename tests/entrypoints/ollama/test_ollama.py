"""Ollama's routes in this process: how requests are converted, what is refused in which words, embeddings of a real model."""

import json

import pytest
from tests.entrypoints.openai.conftest import serve
from tests.oracles.fake_async_llm import FakeAsyncLLM
from tests.oracles.tiny_models import make_tiny_model

from quire import AsyncEngineArgs, AsyncLLMEngine
from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.ollama import conversion
from quire.entrypoints.ollama.protocol import OllamaChat, OllamaGenerate
from quire.errors import CapacityError, EngineError

USER = {"role": "user", "content": "hi"}
ASKED = {"model": "fake", "messages": [USER], "options": {"num_predict": 4}}


@pytest.fixture
def anyio_backend():
    return "asyncio"


def convert(*messages, **fields):
    return conversion.to_chat_request(OllamaChat(model="m", messages=list(messages), **fields))


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


def test_a_result_belongs_to_the_oldest_call_of_its_function():
    chat = convert(
        USER,
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [call("f", x=1), call("g"), call("f", x=2)],
        },
        {"role": "tool", "tool_name": "g", "content": "of g"},
        {"role": "tool", "tool_name": "f", "content": "of 1"},
        {"role": "tool", "content": "of 2"},
    )
    calls = chat.messages[1]["tool_calls"]
    assert [json.loads(each["function"]["arguments"]) for each in calls] == [{"x": 1}, {}, {"x": 2}]
    assert chat.messages[1]["reasoning"] == "hm" and chat.continue_final_message is False
    results = [(each["tool_call_id"], each["name"]) for each in chat.messages[2:]]
    assert results == [(calls[1]["id"], "g"), (calls[0]["id"], "f"), (calls[2]["id"], "f")]


def test_options_format_and_thinking_have_their_names_of_chat_completions():
    schema = {"type": "object"}
    options = {
        "temperature": 0.5,
        "top_k": 3.0,
        "repeat_penalty": 1.1,
        "seed": 7,
        "stop": ["x"],
        "num_ctx": 4096,
        "tfs_z": 1,
    }
    chat = convert(USER, options=options, format=schema, think="low", logprobs=True, top_logprobs=2, stream=False)
    assert (chat.temperature, chat.top_k, chat.repetition_penalty, chat.seed, chat.stop) == (0.5, 3, 1.1, 7, ["x"])
    assert chat.response_format is not None and chat.response_format.json_schema["schema"] == schema
    assert (chat.reasoning_effort, chat.include_reasoning, chat.logprobs, chat.top_logprobs) == ("low", True, True, 2)
    assert chat.stream is False and convert(USER).stream is True, "a stream unless the request says no"
    assert convert(USER, think=False).chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert convert(USER).chat_template_kwargs is None, "the model's own way"
    assert convert(USER, {"role": "assistant", "content": "So"}).continue_final_message is True


def test_images_lie_before_the_text():
    chat = convert(USER | {"images": ["QUJD"]})
    assert [part["type"] for part in chat.messages[0]["content"]] == ["image_url", "text"]
    assert chat.messages[0]["content"][0]["image_url"]["url"].endswith("base64,QUJD")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "owner"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content"),
        ({"messages": [USER | {"images": ["https://a/b.png"]}]}, "messages[0].images[0]"),
        ({"messages": [USER | {"tool_calls": [{"function": {"name": 1}}]}]}, "messages[0].tool_calls[0].function.name"),
        ({"options": {"temperature": "warm"}}, "options.temperature"),
        ({"options": {"top_k": 1.5}}, "options.top_k"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"stop": [1]}}, "options.stop"),
        ({"format": "xml"}, "format"),
        ({"think": "hard"}, "think"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(HTTPError) as caught:
        conversion.to_chat_request(OllamaChat(**{"messages": [USER], **fields}))
    assert caught.value.status == 400 and caught.value.detail.param == param


def test_what_would_change_the_answer_and_is_not_there_is_refused():
    for field, value in {"suffix": "b", "template": "{{ .Prompt }}", "context": [1]}.items():
        with pytest.raises(HTTPError, match=field):
            conversion.check_supported(OllamaGenerate(prompt="a", **{field: value}))
    conversion.check_supported(OllamaGenerate(prompt="a", suffix="", context=[]))
    assert [conversion.most_tokens(OllamaChat(options={"num_predict": n})) for n in (5, -1, -2, 0)] == [
        5,
        None,
        None,
        None,
    ]
    assert all(conversion.is_unload(OllamaChat(keep_alive=zero)) for zero in (0, 0.0, "0", "0s", "0m"))
    assert not any(conversion.is_unload(OllamaChat(keep_alive=some)) for some in (None, -1, "5m", "10s", 30))


@pytest.mark.anyio
async def test_answers_are_lines_of_json_whose_texts_add_up_to_the_whole_answer():
    async with serve() as server:
        for path, body in {
            "/api/chat": ASKED,
            "/api/generate": {"model": "fake", "prompt": "hi", "options": {"num_predict": 4}},
        }.items():
            whole = (await server.client.post(path, json=body | {"stream": False})).json()
            streamed = await server.client.post(path, content=json.dumps(body))  # as curl sends it, with no type
            assert streamed.headers["content-type"] == "application/x-ndjson"
            lines = [json.loads(line) for line in streamed.text.splitlines()]
            texts = [each["message"]["content"] if path == "/api/chat" else each["response"] for each in lines]
            said = whole["message"]["content"] if path == "/api/chat" else whole["response"]
            assert "".join(texts) == said != ""
            assert [each["done"] for each in lines] == [False] * (len(lines) - 1) + [True]
            for last in (whole, lines[-1]):
                assert (last["done_reason"], last["eval_count"], last["prompt_eval_count"] > 0) == ("length", 4, True)
                assert last["total_duration"] > 0


@pytest.mark.anyio
async def test_a_model_is_found_by_its_tag_and_by_no_other_name():
    async with serve() as server:
        answer = await server.client.post("/api/chat", json={"model": "fake:latest"})
        assert answer.json()["done_reason"] == "load" and answer.json()["model"] == "fake"
        for body in ({"model": "other"}, {"model": "fake:7b"}):
            answer = await server.client.post("/api/chat", json=body)
            assert answer.status_code == 404 and answer.json()["error"].endswith("served: fake.")
        assert (await server.client.post("/api/chat", json={})).json()["model"] == "fake", "the only one"
        tags = (await server.client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == ["fake"]
        shown = (await server.client.post("/api/show", json={"name": "fake:latest"})).json()
        assert shown["capabilities"][0] == "completion" and shown["model_info"]["Fake.context_length".lower()] == 512


@pytest.mark.anyio
async def test_a_page_of_another_origin_may_not_send_what_is_not_called_json():
    async with serve() as server:
        form = {"content-type": "application/x-www-form-urlencoded"}
        body = json.dumps(ASKED)
        assert (await server.client.post("/api/chat", content=body, headers=form)).status_code == 200
        answer = await server.client.post("/api/chat", content=body, headers=form | {"origin": "http://elsewhere"})
        assert answer.status_code == 400 and "Content-Type" in answer.json()["error"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("failure", "status"), [(CapacityError("no room", retry_after=3), 429), (EngineError("broken"), 500)]
)
async def test_errors_are_a_sentence(failure, status):
    engine = FakeAsyncLLM()
    engine.failure = failure
    async with serve(engine) as server:
        answer = await server.client.post("/api/chat", json=ASKED)
        assert answer.status_code == status and set(answer.json()) == {"error"}


@pytest.mark.anyio
async def test_what_a_server_does_not_do_by_a_request_it_says():
    async with serve() as server:
        answers = [await server.client.request("DELETE", "/api/delete", json={"model": "fake"})]
        answers += [
            await server.client.post(f"/api/{verb}", json={"model": "fake"}) for verb in ("copy", "create", "push")
        ]
        answers.append(await server.client.post("/api/generate", json={"model": "fake", "keep_alive": 0}))
        assert {answer.status_code for answer in answers} == {400}
        assert all("quire" in answer.json()["error"] or "--" in answer.json()["error"] for answer in answers)
        pulled = await server.client.post("/api/pull", json={"model": "fake"})
        assert json.loads(pulled.text.splitlines()[-1]) == {"status": "success"}
        other = await server.client.post("/api/pull", json={"model": "other"})
        assert other.status_code == 404 and "quire run MODEL" in other.json()["error"]


@pytest.mark.anyio
async def test_vectors_are_those_of_openais_route_and_long_texts_are_cut(tmp_path):
    path = make_tiny_model("Qwen3Model", tmp_path)
    args = AsyncEngineArgs(model=str(path), max_model_len=32, num_gpu_blocks_override=50, served_model_name=["e"])
    engine = AsyncLLMEngine.from_engine_args(args, core="inproc")
    try:
        async with serve(engine) as server:  # type: ignore[arg-type]
            texts = ["how tall", "a river " * 50]
            ours = await server.client.post("/v1/embeddings", json={"input": texts[0]})
            answer = (await server.client.post("/api/embed", json={"model": "e", "input": texts})).json()
            assert answer["embeddings"][0] == pytest.approx(ours.json()["data"][0]["embedding"])
            assert len(answer["embeddings"]) == 2 and answer["prompt_eval_count"] > 32
            one = (await server.client.post("/api/embeddings", json={"model": "e", "prompt": texts[0]})).json()
            assert one["embedding"] == pytest.approx(answer["embeddings"][0])
            refused = await server.client.post("/api/embed", json={"model": "e", "input": texts, "truncate": False})
            assert refused.status_code == 400 and "32" in refused.json()["error"]
            shown = (await server.client.post("/api/show", json={"model": "e"})).json()
            assert shown["capabilities"] == ["embedding"]
    finally:
        engine.shutdown()
