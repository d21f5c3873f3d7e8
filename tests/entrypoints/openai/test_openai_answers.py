"""What the routes answer when all is well."""

import asyncio
import json
from typing import Any

import pytest
from tests.oracles.fake_async_llm import FakeAsyncLLM, engine_config

from quire.entrypoints.http.state import ServerSettings

pytestmark = pytest.mark.anyio


def events(text: str) -> list[Any]:
    """The decoded events of a stream; the last one must be `[DONE]`."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks]


async def test_a_chat_completion_has_the_protocols_shape(server):
    async with server() as s:
        response = await s.chat()
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "chat.completion" and body["model"] == "fake"
        assert body["id"].startswith("chatcmpl-")
        choice = body["choices"][0]
        message = {name: value for name, value in choice["message"].items() if value is not None}
        assert message == {"role": "assistant", "content": "<USE"} and choice["message"]["refusal"] is None
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None
        prompt = len("<user>hi</user><assistant>")
        expected = {"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4}
        assert body["usage"] == {**expected, "prompt_tokens_details": None, "completion_tokens_details": None}


async def test_a_chat_stream_is_role_text_finish_and_done(server):
    async with server() as s:
        response = await s.chat(stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response.text)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        assert all("usage" not in chunk for chunk in chunks)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas == [
            {"role": "assistant", "content": ""},
            {"content": "<"},
            {"content": "U"},
            {"content": "S"},
            {"content": "E"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]


async def test_stream_usage_comes_last_with_no_choices_and_null_before(server):
    async with server() as s:
        response = await s.chat(stream=True, stream_options={"include_usage": True})
        *chunks, last = events(response.text)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


async def test_continuous_usage_counts_up(server):
    async with server() as s:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for response in (
            await s.chat(stream=True, stream_options=options),
            await s.complete(stream=True, stream_options=options),
        ):
            counts = [chunk["usage"]["completion_tokens"] for chunk in events(response.text)]
            assert counts == sorted(counts) and counts[-1] == 4


async def test_streams_of_n_answers_carry_each_index(server):
    async with server() as s:
        for response in (await s.chat(stream=True, n=3), await s.complete(stream=True, n=3)):
            text = {0: "", 1: "", 2: ""}
            for chunk in events(response.text):
                choice = chunk["choices"][0]
                text[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            assert len(set(text.values())) == 1 and len(text[0]) == 4


async def test_text_that_needs_escapes_survives_the_stream(server):
    async with server() as s:
        prompt = 'say "\\ \n\t\u0001 \u00e9'
        response = await s.complete(prompt=prompt, stream=True, max_tokens=10, add_special_tokens=False)
        text = "".join(chunk["choices"][0]["text"] for chunk in events(response.text))
        assert text == prompt.upper()[:10]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["ABCA"]),
        (["abc", "de"], ["ABCA", "DEDE"]),
        ([97, 98], ["ABAB"]),
        ([[97], [98, 99]], ["AAAA", "BCBC"]),
        (["abc", [100]], ["ABCA", "DDDD"]),
    ],
)
async def test_prompts_may_be_texts_or_token_ids_one_or_many(server, prompt, texts):
    async with server() as s:
        body = (await s.complete(prompt=prompt)).json()
        assert [choice["text"] for choice in body["choices"]] == texts
        assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
        assert body["usage"]["completion_tokens"] == 4 * len(texts)
        streamed = dict.fromkeys(range(len(texts)), "")
        for chunk in events((await s.complete(prompt=prompt, stream=True)).text):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert list(streamed.values()) == texts


async def test_n_answers_to_several_prompts_are_numbered_prompt_by_prompt(server):
    async with server() as s:
        body = (await s.complete(prompt=["abc", "de"], n=2)).json()
        assert [choice["text"] for choice in body["choices"]] == ["ABCA", "ABCA", "DEDE", "DEDE"]


async def test_best_of_shows_the_likeliest_answers(server):
    async with server() as s:
        body = (await s.complete(n=1, best_of=3)).json()
        assert len(body["choices"]) == 1
        assert s.engine.started[0][2].n == 3 and s.engine.started[0][2].logprobs == 0
        assert body["usage"]["completion_tokens"] == 12


async def test_echo_gives_the_prompt_before_the_answer(server):
    async with server() as s:
        assert (await s.complete(echo=True)).json()["choices"][0]["text"] == "abcABCA"
        streamed = events((await s.complete(echo=True, stream=True)).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "abcABCA"


async def test_echo_with_no_tokens_scores_the_prompt_alone(server):
    async with server() as s:
        body = (await s.complete(echo=True, max_tokens=0, logprobs=1, add_special_tokens=False)).json()
        choice = body["choices"][0]
        assert choice["text"] == "abc" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"][1:] == ["b", "c"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert body["usage"]["completion_tokens"] == 0


async def test_completion_logprobs_are_parallel_lists_with_offsets(server):
    async with server() as s:
        whole = (await s.complete(logprobs=2)).json()["choices"][0]["logprobs"]
        assert whole["tokens"] == ["A", "B", "C", "A"] and whole["text_offset"] == [0, 1, 2, 3]
        assert whole["token_logprobs"] == [-0.5] * 4
        assert whole["top_logprobs"][0] == {"B": -0.25, "A": -0.5}
        offsets = []
        for chunk in events((await s.complete(logprobs=2, stream=True)).text):
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
        assert offsets == [0, 1, 2, 3]


async def test_chat_logprobs_name_tokens_bytes_and_alternatives(server):
    async with server() as s:
        content = (await s.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
        assert len(content) == 4
        assert content[0]["token"] == "<" and content[0]["bytes"] == [ord("<")]
        assert len(content[0]["top_logprobs"]) == 1
        chunks = events((await s.chat(logprobs=True, top_logprobs=1, stream=True)).text)
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert [entry["content"][0] for entry in streamed] == content


async def test_chat_logprobs_without_alternatives_have_an_empty_list(server):
    async with server() as s:
        content = (await s.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert content[0]["top_logprobs"] == []


async def test_tokens_can_be_shown_as_ids(server):
    async with server() as s:
        body = (await s.complete(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)).json()
        choice = body["choices"][0]
        assert choice["logprobs"]["tokens"] == [f"token_id:{ord(c)}" for c in "ABCA"]
        assert choice["token_ids"] == [ord(c) for c in "ABCA"]
        assert choice["prompt_token_ids"] == [256, 97, 98, 99]
        chat = (await s.chat(return_token_ids=True)).json()
        assert chat["prompt_token_ids"] == list(b"<user>hi</user><assistant>")
        assert len(chat["choices"][0]["token_ids"]) == 4


async def test_prompt_logprobs_are_objects_keyed_by_token_id(server):
    async with server() as s:
        choice = (await s.complete(prompt_logprobs=1)).json()["choices"][0]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1]["97"] == {"logprob": -0.5, "rank": 2, "decoded_token": "a"}
        assert (await s.chat(prompt_logprobs=0)).json()["prompt_logprobs"][0] is None


async def test_the_models_generation_config_fills_what_the_request_leaves_out(server):
    engine = FakeAsyncLLM(engine_config(default_sampling={"temperature": 0.3, "top_k": 7}))
    async with server(engine) as s:
        await s.chat()
        await s.chat(temperature=0.9)
        assert [(p.temperature, p.top_k) for _, _, p in engine.started] == [(0.3, 7), (0.9, 7)]


async def test_every_sampling_field_reaches_the_engine(server):
    fields = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [5],
        "min_tokens": 1,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [1, 2],
        "bad_words": ["bad"],
    }
    async with server() as s:
        assert (await s.complete(**fields, logit_bias={"7": 2.5})).status_code == 200
        params = s.engine.started[0][2]
        assert {name: getattr(params, name) for name in fields} == fields
        assert params.logit_bias == {7: 2.5} and params.max_tokens == 4


async def test_a_chat_may_run_to_the_end_of_the_context(server):
    async with server() as s:
        await s.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert s.engine.started[0][2].max_tokens == 512 - len("<user>hi</user><assistant>")
        await s.client.post("/v1/completions", json={"prompt": "a"})
        assert s.engine.started[1][2].max_tokens == 16


async def test_messages_reach_the_template(server):
    async with server() as s:
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "T"},
        ]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        response = await s.chat(messages=messages, tools=tools, chat_template_kwargs={"shout": True})
        assert response.status_code == 200
        text = bytes(s.engine.started[0][1]["prompt_token_ids"]).decode()
        assert text.startswith("<system>S</system><user>a\nb</user><assistant>None</assistant><tool>T</tool>[")
        assert text.endswith("!<assistant>") and '"name": "f"' in text
        await s.chat(messages=messages, tools=tools, tool_choice="none")
        assert '"name"' not in bytes(s.engine.started[1][1]["prompt_token_ids"]).decode()


async def test_the_final_message_can_be_continued_and_echoed(server):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    options = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    async with server() as s:
        body = (await s.chat(messages=messages, **options)).json()
        assert bytes(s.engine.started[0][1]["prompt_token_ids"]).decode().endswith("<assistant>Well")
        assert body["choices"][0]["message"]["content"] == "Well<USE"
        chunks = events((await s.chat(messages=messages, stream=True, **options)).text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Well<USE"


async def test_prompts_are_truncated_from_the_left_or_the_right(server):
    async with server() as s:
        await s.complete(prompt="abcdef", truncate_prompt_tokens=2)
        await s.complete(prompt="abcdef", truncate_prompt_tokens=2, truncation_side="right")
        prompts = [bytes(p["prompt_token_ids"][-1:]).decode() for _, p, _ in s.engine.started]
        assert [len(p["prompt_token_ids"]) for _, p, _ in s.engine.started] == [2, 2] and prompts == ["f", "a"]


async def test_beam_search_answers_with_as_many_choices_as_n(server):
    async with server() as s:
        body = (await s.complete(use_beam_search=True, n=2)).json()
        assert len(body["choices"]) == 2


async def test_tokenize_and_detokenize_are_inverse(server):
    async with server() as s:
        body = (await s.client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == 512
        back = await s.client.post("/detokenize", json={"tokens": body["tokens"]})
        assert back.json() == {"prompt": "héllo"}
        chat = await s.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
        assert chat.json()["tokens"] == list(b"<user>x</user><assistant>")
        empty = await s.client.post("/detokenize", json={"tokens": []})
        assert empty.json() == {"prompt": ""}


async def test_models_are_listed_under_their_served_names(server):
    async with server(settings=ServerSettings(served_model_names=("a/b", "c"))) as s:
        listed = (await s.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["a/b", "c"]
        assert (await s.client.get("/v1/models/a/b")).json()["max_model_len"] == 512
        assert (await s.complete(model="c")).json()["model"] == "c"
        assert (await s.complete()).json()["model"] == "a/b"


async def test_request_ids_are_taken_over_and_always_returned(server):
    async with server() as s:
        response = await s.client.get("/version", headers={"X-Request-Id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
        assert (await s.client.get("/version")).headers["x-request-id"]
        assert (await s.client.get("/version", headers={"X-Request-Id": "x" * 999})).headers[
            "x-request-id"
        ] != "x" * 999
        body = {"prompt": "a", "max_tokens": 1}
        named = await s.client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        assert named.json()["id"] == "cmpl-mine"
        assert (await s.complete(request_id="field")).json()["id"] == "cmpl-field"


async def test_two_requests_with_the_same_id_do_not_collide_in_the_engine(server):
    async with server() as s:
        responses = await asyncio.gather(*(s.complete(request_id="same") for _ in range(4)))
        assert {response.status_code for response in responses} == {200}
        assert len({request_id for request_id, _, _ in s.engine.started}) == 4


async def test_cached_tokens_are_told_when_the_operator_wants_it(server):
    async with server(settings=ServerSettings(enable_prompt_tokens_details=True)) as s:
        usage = (await s.chat(messages=[{"role": "user", "content": "a" * 60}])).json()["usage"]
        pages = usage["prompt_tokens"] // 16 * 16
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3, "created_cache_tokens": pages - 3}


async def test_the_openapi_page_describes_the_bodies_that_are_read(server):
    async with server() as s:
        document = (await s.client.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        assert "min_p" in schemas["ChatCompletionRequest"]["properties"]
        assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
        assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletionRequest"}
        assert (await s.client.get("/docs")).status_code == 200


async def test_browsers_of_allowed_origins_may_ask(server):
    async with server(allowed_origins=["http://app"], api_keys=["k"]) as s:
        headers = {"Origin": "http://app", "Access-Control-Request-Method": "POST"}
        response = await s.client.options("/v1/completions", headers=headers)
        assert response.headers["access-control-allow-origin"] == "http://app"


async def test_a_browser_of_an_allowed_origin_can_read_answers_and_refusals(server):
    async with server(allowed_origins=["http://friend"]) as s:
        for body, status in (({"prompt": "a", "max_tokens": 1}, 200), ({"prompt": 5}, 400)):
            answer = await s.client.post("/v1/completions", json=body, headers={"origin": "http://friend"})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, "http://friend")
