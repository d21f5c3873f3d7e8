"""`/v1/messages` in this process: how requests are converted, how answers are cut into blocks, and errors."""

import json

import pytest
from tests.entrypoints.openai.conftest import serve
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.anthropic.conversion import to_chat_request
from quire.entrypoints.anthropic.messages import BlockWriter
from quire.entrypoints.anthropic.protocol import MessagesRequest, TextBlock, ThinkingBlock, ToolUseBlock
from quire.entrypoints.http.errors import HTTPError
from quire.errors import CapacityError, EngineError
from quire.parsers.pieces import Piece

USER = {"role": "user", "content": "hi"}
BODY = {"messages": [USER], "max_tokens": 4}


@pytest.fixture
def anyio_backend():
    return "asyncio"


def convert(messages, **fields):
    return to_chat_request(MessagesRequest(messages=messages, max_tokens=4, **fields))


def text(words):
    return {"type": "text", "text": words}


def test_results_of_tools_become_messages_in_their_order():
    use = [{"type": "tool_use", "id": f"t{index}", "name": f"f{index}", "input": {"x": index}} for index in range(2)]
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("one"), text("more")]},
        {"type": "tool_result", "tool_use_id": "t0", "is_error": True},
    ]
    chat = convert(
        [
            USER,
            {"role": "assistant", "content": [thought, text("so"), *use]},
            {"role": "user", "content": [*results, text("go on"), text("please")]},
        ],
        system=[text("a"), text("b")],
    )
    assistant = chat.messages[2]
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert chat.messages[0]["content"] == "a\nb" and chat.messages[5]["content"] == "go on\nplease"
    assert (assistant["content"], assistant["reasoning"]) == ("so", "hm")
    assert [json.loads(call["function"]["arguments"]) for call in assistant["tool_calls"]] == [{"x": 0}, {"x": 1}]
    assert chat.messages[3] == {"role": "tool", "tool_call_id": "t1", "content": "one\nmore", "name": "f1"}
    assert chat.messages[4] == {"role": "tool", "tool_call_id": "t0", "content": "", "name": "f0"}
    assert chat.continue_final_message is False


def test_turns_of_one_speaker_are_one_turn():
    chat = convert([USER, {"role": "user", "content": [text("there")]}, {"role": "assistant", "content": "A"}, USER])
    assert [message["content"] for message in chat.messages] == ["hi\nthere", "A", "hi"]


def test_settings_have_their_names_of_chat_completions():
    schema = {"type": "object", "properties": {}}
    tools = [{"type": "custom", "name": "f", "description": "d", "input_schema": schema}]
    chat = convert(
        [USER, {"role": "assistant", "content": "So"}],
        tools=tools,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive"},
        output_config={"effort": "low"},
        stop_sequences=["x"],
        top_k=5,
        chat_template_kwargs={"thinking": "mine"},
    )
    assert chat.tools == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}]
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.include_reasoning) == ("auto", False, True)
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": "mine"}
    assert (chat.stop, chat.top_k, chat.reasoning_effort, chat.continue_final_message) == (["x"], 5, "low", True)
    named = {"type": "function", "function": {"name": "f"}}
    assert convert([USER], tool_choice={"type": "tool", "name": "f"}).tool_choice == named
    assert convert([USER], tool_choice={"type": "any"}).tool_choice == "required"
    assert convert([USER], thinking={"type": "disabled"}).include_reasoning is False


def test_images_are_parts_of_turns_and_of_results_of_tools():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    link = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
    given = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
        {"role": "user", "content": "it"},
        asked,
        {"role": "user", "content": [given, {"type": "text", "text": "and"}, link]},
    ]
    first, _, result, last = convert(messages).messages
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    assert first["content"] == [{"type": "text", "text": "see"}, shown, {"type": "text", "text": "it"}]
    assert result["content"] == [shown] and result["content"][0].field == "messages[3].content[0].content[0].source"
    assert last["content"][1]["image_url"] == {"url": "https://a/b.png"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}
                ]
            },
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[1].content[0].id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": 5}}, "output_config.format"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_own_path(fields, param):
    with pytest.raises(HTTPError) as refused:
        to_chat_request(MessagesRequest(**{**BODY, **fields}))
    assert refused.value.status == 400 and refused.value.detail.param == param


PIECES = [
    Piece("reasoning", "I "),
    Piece("reasoning", "think"),
    Piece("content", "so"),
    Piece("call", "f", 0),
    Piece("arguments", '{"a":', 0),
    Piece("arguments", " 1}", 0),
    Piece("call", "g", 1),
    Piece("content", "and \n\u20ac"),
]


def whole_blocks(pieces, call_id):
    writer = BlockWriter(call_id)
    for piece in pieces:
        writer.write(piece)
    writer.close()
    return writer.blocks


def test_a_block_ends_where_another_kind_begins():
    thinking, so, first, second, last = whole_blocks(PIECES, lambda name, index, _: f"{name}{index}")
    assert isinstance(thinking, ThinkingBlock) and thinking.thinking == "I think" and len(thinking.signature) == 64
    assert (so, last) == (TextBlock("so"), TextBlock("and \n\u20ac"))
    assert (first, second) == (ToolUseBlock("f0", "f", {"a": 1}), ToolUseBlock("g1", "g", {}))


def test_the_stream_of_the_blocks_adds_up_to_them():
    def call_id(name, index, _):
        return f"{name}{index}"

    writer = BlockWriter(call_id)
    stream = b"".join([writer.write(piece) for piece in PIECES] + [writer.close(), writer.close()]).decode()
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    kinds = [line[7:] for line in stream.splitlines() if line.startswith("event: ")]
    assert kinds == [event["type"] for event in events]
    blocks: list[dict] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
            assert event["index"] == len(blocks) - 1
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            (name,) = set(delta) - {"type"}
            key = "json" if name == "partial_json" else name
            blocks[event["index"]][key] += delta[name]
    whole = [json.loads(json.dumps(block)) for block in map(_as_dict, whole_blocks(PIECES, call_id))]
    for block, expected in zip(blocks, whole, strict=True):
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments or "{}")
        assert block == expected


def _as_dict(block):
    import msgspec

    return msgspec.to_builtins(block)


def test_arguments_that_were_cut_off_are_kept_as_they_are():
    (block,) = whole_blocks([Piece("call", "f"), Piece("arguments", '{"a": "b')], lambda name, index, _: "id")
    assert isinstance(block, ToolUseBlock) and block.input == {"INVALID_JSON": '{"a": "b'}


@pytest.mark.anyio
async def test_a_message_has_the_protocols_shape():
    async with serve() as s:
        body = (await s.client.post("/v1/messages", json=BODY)).json()
    assert body.pop("id").startswith("msg_")
    usage = {"input_tokens": len("<user>hi</user><assistant>"), "output_tokens": 4}
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "<USE"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": usage
        | {"cache_read_input_tokens": None, "cache_creation_input_tokens": None, "output_tokens_details": None},
    }


@pytest.mark.anyio
async def test_more_tokens_than_fit_are_as_many_as_fit():
    async with serve() as s:
        body = (await s.client.post("/v1/messages", json=BODY | {"max_tokens": 100_000})).json()
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert body["usage"]["input_tokens"] + body["usage"]["output_tokens"] == 512


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("content", "status", "kind", "word"),
    [
        (b"{", 400, "invalid_request_error", "JSON"),
        (b'{"messages": []}', 400, "invalid_request_error", "max_tokens"),
        (b'{"messages": [], "max_tokens": 4}', 400, "invalid_request_error", "at least one"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, "invalid_request_error", "at least 1"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "model": "y"}', 404, "not_found_error", "y"),
    ],
)  # fmt: skip
async def test_errors_are_in_anthropics_shape(content, status, kind, word):
    async with serve() as s:
        response = await s.client.post("/v1/messages", content=content)
        assert (await s.client.post("/v1/messages", json=BODY)).status_code == 200
    body = response.json()
    assert response.status_code == status and body["type"] == "error"
    assert body["error"]["type"] == kind and word in body["error"]["message"]


@pytest.mark.anyio
async def test_failures_of_the_engine_are_in_anthropics_shape():
    engine = FakeAsyncLLM()
    async with serve(engine) as s:
        engine.failure = CapacityError("full")
        refused = await s.client.post("/v1/messages", json=BODY | {"stream": True})
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        engine.failure, engine.fail_after = EngineError("broken"), 2
        stream = (await s.client.post("/v1/messages", json=BODY | {"stream": True})).text
    *_, last = stream.strip().split("\n\n")
    assert (
        last.startswith("event: error\ndata: ") and json.loads(last.split("data: ")[1])["error"]["type"] == "api_error"
    )
    assert "broken" not in stream and "message_stop" not in stream and "[DONE]" not in stream


@pytest.mark.anyio
async def test_both_forms_of_keys_are_accepted():
    async with serve(api_keys=["secret"]) as s:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await s.client.post("/v1/messages", json=BODY, headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}):
            response = await s.client.post("/v1/messages", json=BODY, headers=headers)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"


@pytest.mark.anyio
async def test_tokens_are_counted():
    async with serve() as s:
        body = {"messages": [USER], "system": "s"}
        response = await s.client.post("/v1/messages/count_tokens", json=body)
        assert response.json() == {"input_tokens": len("<system>s</system><user>hi</user><assistant>")}


@pytest.mark.anyio
async def test_models_are_listed_in_the_protocol_of_who_asks():
    async with serve() as s:
        anthropics = {"anthropic-version": "2023-06-01"}
        page = (await s.client.get("/v1/models", headers=anthropics)).json()
        (card,) = page["data"]
        assert (card["type"], card["id"], card["display_name"]) == ("model", "fake", "fake")
        assert card["created_at"].endswith("Z") and card["max_input_tokens"] == 512
        assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "fake", "fake")
        assert (await s.client.get("/v1/models/fake", headers=anthropics)).json() == card
        assert (await s.client.get("/v1/models")).json()["object"] == "list"


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_the_end_of_a_conversation_is_not_taken_for_the_whole(path):
    threads = [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {"type": "x"}, {}]
    async with serve() as s:
        begun, continued, *wrong = [await s.client.post(path, json=BODY | {"thread": thread}) for thread in threads]
    assert begun.status_code == 200 and [answer.status_code for answer in wrong] == [400, 400]
    error = continued.json()["error"]
    assert (continued.status_code, error["type"]) == (404, "not_found_error")
    assert error["details"] == {"error_code": "thread_not_found"} and "'msg_1' is not kept" in error["message"]
