"""How a response's input becomes a chat, and what is refused by its own path."""

import json

import pytest

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.responses.prepare import normalize_input, to_chat_request
from quire.entrypoints.responses.protocol import ReasoningConfig, ResponsesRequest, TextConfig

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


def convert(given, history=(), **fields):
    request = ResponsesRequest(input=given, **fields)
    return to_chat_request(request, list(history), normalize_input(request.input))


def call(number, arguments="{}", **fields):
    return {"type": "function_call", "call_id": f"c{number}", "name": f"f{number}", "arguments": arguments, **fields}


def result(number, output="out"):
    return {"type": "function_call_output", "call_id": f"c{number}", "output": output}


def text(words, kind="input_text"):
    return {"type": kind, "text": words}


def test_a_text_is_a_message_of_the_user():
    (item,) = normalize_input("hi")
    assert item.pop("id").startswith("msg_")
    assert item == {"type": "message", "role": "user", "content": [text("hi")]}
    assert convert("hi").messages == [USER]


def test_items_keep_their_ids_and_get_the_missing_ones():
    given = [{**USER, "id": "mine"}, call(0), result(0), {"type": "reasoning", "summary": []}]
    ids = [item["id"] for item in normalize_input(given)]
    assert ids[0] == "mine" and [one.split("_")[0] for one in ids[1:]] == ["fc", "fco", "rs"]
    assert "id" not in given[1]


def test_what_one_speaker_says_is_one_turn():
    thought = {"type": "reasoning", "summary": [], "content": [text("hm", "reasoning_text")]}
    said = {"type": "message", "role": "assistant", "content": [text("so", "output_text")]}
    chat = convert(
        [
            USER,
            thought,
            said,
            call(0, '{"x": 1}'),
            call(1),
            result(1, [text("a"), text("b")]),
            result(0),
            text_of("user"),
        ],
        instructions="be",
        history=normalize_input([{"role": "developer", "content": "brief"}, {"role": "user", "content": "hello"}]),
    )
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user"]
    assert chat.messages[0]["content"] == "be\nbrief" and chat.messages[1]["content"] == "hello\nhi"
    turn = chat.messages[2]
    assert (turn["content"], turn["reasoning"]) == ("so", "hm")
    assert [json.loads(one["function"]["arguments"]) for one in turn["tool_calls"]] == [{"x": 1}, {}]
    assert chat.messages[3] == {"role": "tool", "tool_call_id": "c1", "name": "f1", "content": "a\nb"}
    assert chat.continue_final_message is False


def text_of(role):
    return {"role": role, "content": [text("go"), text("on")]}


def test_thoughts_after_an_answer_begin_another_turn():
    thoughts = [{"type": "reasoning", "summary": [text(word, "summary_text")]} for word in ("one", "two")]
    chat = convert([USER, thoughts[0], call(0), result(0), thoughts[1], {"role": "assistant", "content": "A"}, USER])
    assert [message.get("reasoning") for message in chat.messages] == [None, "one", None, "two", None]
    chat = convert([USER, thoughts[0], {"role": "assistant", "content": "A"}, thoughts[1], call(0), result(0)])
    assert [message.get("reasoning") for message in chat.messages] == [None, "one", "two", None]


def test_an_answer_that_was_cut_off_can_go_on():
    cut = {"role": "assistant", "content": "So", "status": "incomplete"}
    assert convert([USER, cut]).continue_final_message is True
    assert convert([USER, {**cut, "status": "completed"}]).continue_final_message is False
    chat = convert([USER, call(0, '{"x": ', status="incomplete"), USER])
    assert chat.messages == [{"role": "user", "content": "hi\nhi"}]


def test_settings_have_their_names_of_chat_completions():
    schema = {"type": "object", "properties": {}}
    chat = convert(
        "hi",
        tools=[TOOL],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning=ReasoningConfig(effort="low"),
        text=TextConfig(format={"type": "json_schema", "name": "n", "schema": schema}, verbosity="low"),
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        top_k=5,
        seed=7,
        chat_template_kwargs={"thinking": "mine"},
    )
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.reasoning_effort) == ("auto", False, "low")
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": "mine"}
    assert chat.response_format is not None and chat.response_format.json_schema == {"name": "n", "schema": schema}
    assert (chat.logprobs, chat.top_logprobs, chat.top_k, chat.seed, chat.verbosity) == (True, 3, 5, 7, "low")
    named = {"type": "function", "function": {"name": "f"}}
    assert convert("hi", tool_choice={"type": "function", "name": "f"}).tool_choice == named
    assert convert("hi", reasoning=ReasoningConfig(effort="none")).chat_template_kwargs == {
        "enable_thinking": False,
        "thinking": False,
    }
    assert convert("hi").chat_template_kwargs is None and convert("hi").logprobs is None


IMAGE = {"type": "input_image", "image_url": "data:"}


def test_images_are_parts_of_the_turn_in_which_they_are_said():
    items = [USER, {"role": "user", "content": [text("a"), IMAGE, text("b")]}, {"role": "user", "content": "c"}]
    (turn,) = convert(items).messages
    assert [part.get("text", part["type"]) for part in turn["content"]] == ["hi", "a", "image_url", "b", "c"]
    part = turn["content"][2]
    assert (part.path, part.field) == ("input[1].content[1]", "input[1].content[1].image_url")
    outputs = [USER, call(0), {"type": "function_call_output", "call_id": "c0", "output": [IMAGE]}]
    assert convert(outputs).messages[-1]["content"] == [{"type": "image_url", "image_url": "data:"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [IMAGE | {"file_id": "f"}]}]}, "input[0].content[0].file_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [text(5)]}]}, "input[0].content[0].text"),
        ({"input": [USER | {"id": 5}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [USER, call(0, "{")]}, "input[1].arguments"),
        ({"input": [USER, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
        ({"input": [USER, call(0)]}, "input"),
        ({"input": [USER, result(0)]}, "input[1].call_id"),
        ({"input": [USER, call(0), {"type": "function_call_output", "call_id": "c0"}]}, "input[2].output"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
        ({"tools": [{"type": "code_interpreter", "container": {}}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": TextConfig(format={"type": "grammar"})}, "text.format.type"),
        ({"text": TextConfig(format={"type": "json_schema", "name": "n"})}, "text.format.schema"),
        ({"include": ["everything"]}, "include[0]"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"previous_input_messages": [{}]}, "previous_input_messages"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_own_path(fields, param):
    with pytest.raises(HTTPError) as refused:
        convert(**{"given": fields.pop("input", "hi"), **fields})
    assert refused.value.status == 400 and refused.value.detail.param == param
    assert param.split(".")[0].split("[")[0] in refused.value.detail.message
