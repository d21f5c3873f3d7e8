"""Calls that have to be made: what requests say of them, and that a server's answers are such calls, whole and streamed."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from tests.oracles.demo_server import DemoServer
from tests.parsers.writing import SPECIAL_IDS, accepts, write

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.openai.answers import AnswerReader, PieceReader, answer_reader
from quire.entrypoints.openai.chat_generation import constrain_answer
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.entrypoints.openai.tool_choice import enforced, read_tool_choice
from quire.outputs import CompletionOutput
from quire.parsers.choice import choose_formats
from quire.parsers.pieces import Answer
from quire.sampling_params import SamplingParams, StructuredOutputsParams, Thinking

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city"],
}
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"enum": [1, 2]}},
    "required": ["on", "level"],
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("get_weather", WEATHER), tool("switch", SWITCH)]
NAMED = {"type": "function", "function": {"name": "switch"}}
ONLY_SWITCH = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


def request_of(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatCompletionRequest)


@pytest.mark.parametrize(
    ("fields", "kind", "names"),
    [
        ({}, "none", []),
        ({"tools": []}, "none", []),
        ({"tool_choice": "auto"}, "none", []),
        ({"tools": TOOLS}, "auto", ["get_weather", "switch"]),
        ({"tools": TOOLS, "tool_choice": "none"}, "none", []),
        ({"tools": TOOLS, "tool_choice": "required"}, "required", ["get_weather", "switch"]),
        ({"tools": TOOLS, "tool_choice": "any"}, "required", ["get_weather", "switch"]),
        ({"tools": TOOLS, "tool_choice": NAMED}, "named", ["switch"]),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "switch"}}, "named", ["switch"]),
        ({"tools": TOOLS, "tool_choice": ONLY_SWITCH}, "auto", ["switch"]),
        ({"tools": TOOLS, "tool_choice": {**ONLY_SWITCH["allowed_tools"], "type": "allowed_tools", "mode": "required"}},
         "required", ["switch"]),
        ({"tools": [{"name": "bare", "parameters": {}}], "tool_choice": "required"}, "required", ["bare"]),
    ],
)  # fmt: skip
def test_a_choice_names_functions(fields: dict[str, Any], kind: str, names: list[str]) -> None:
    choice = read_tool_choice(request_of(**fields))
    assert (choice.kind, [function.name for function in choice.functions]) == (kind, names)
    assert choice.must_call == (kind in ("required", "named"))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "at least one function"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "at least one function"),
        ({"tool_choice": NAMED}, "tool_choice", "at least one function"),
        ({"tool_choice": "maybe", "tools": TOOLS}, "tool_choice", "'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": TOOLS},
         "tool_choice.function.name", "'nope' is not one of `tools`: get_weather, switch"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function.name", "expected"),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "tool_choice.type", "'custom'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "all", "tools": [NAMED]}, "tools": TOOLS},
         "tool_choice.mode", "'all'"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}, "tools": TOOLS}, "tool_choice.tools", "at least one"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{}]}, "tools": TOOLS},
         "tool_choice.tools[0].function.name", "expected"),
        ({"tools": [{}]}, "tools[0].function.name", "expected"),
        ({"tools": [TOOLS[0], tool("")]}, "tools[1].function.name", "expected"),
        ({"tools": [tool("f" * 300)]}, "tools[0].function.name", "300 characters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [tool("f", 5)]}, "tools[0].function.parameters", "schema"),
        ({"tools": [tool("f", {"type": "string"})]}, "tools[0].function.parameters.type", "'string'"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_path(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(HTTPError, match=words) as caught:
        read_tool_choice(request_of(**fields))
    assert (caught.value.status, caught.value.detail.param) == (400, param)


class Tokenizer:
    """Bytes, and the markers of all formats as special tokens."""

    token_bytes = object()
    special_ids = frozenset(SPECIAL_IDS.values())
    all_special_tokens = tuple(SPECIAL_IDS)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode()

    def token_to_id(self, token: str) -> int | None:
        return SPECIAL_IDS.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        return next((token for token, known in SPECIAL_IDS.items() if known == token_id), None)


def constrained(tools_format: str, reasoning: str = "none", **fields: Any) -> tuple[Any, SamplingParams]:
    params = SamplingParams(max_tokens=9, structured_outputs=fields.pop("form", None))
    formats, tokenizer = choose_formats(reasoning, tools_format, None), Tokenizer()
    reader = answer_reader(formats, request_of(**fields), tokenizer, [])
    constrain_answer(params, reader)
    return reader, params


def whole(reader: AnswerReader, text: str) -> Answer:
    return PieceReader(reader).read_whole(CompletionOutput(0, text, [], finish_reason="stop"))


def grammar(params: SamplingParams) -> str:
    assert params.structured_outputs is not None and params.structured_outputs.grammar is not None
    return params.structured_outputs.grammar


def test_a_forced_call_is_written_in_the_model_s_own_format_after_its_thoughts() -> None:
    reader, params = constrained("kimi_k2", "deepseek_r1", tools=TOOLS, tool_choice="required")
    good, bad = [("get_weather", {"city": "Ulm"})], [("switch", {"on": 1, "level": 1})]
    assert accepts(grammar(params), write("kimi_k2", good), SPECIAL_IDS)
    assert not accepts(grammar(params), write("kimi_k2", bad), SPECIAL_IDS)
    assert params.thinking == Thinking(list(b"</think>"))
    assert reader.finish_reason("stop", 1) == "tool_calls"
    assert reader.finish_reason("length", 1) == "length"


def test_a_named_function_is_called_once() -> None:
    reader, params = constrained("hermes", tools=TOOLS, tool_choice=NAMED)
    call = ("switch", {"on": True, "level": 2})
    assert accepts(grammar(params), write("hermes", [call]), SPECIAL_IDS)
    assert not accepts(grammar(params), write("hermes", [call, call]), SPECIAL_IDS)
    assert not accepts(grammar(params), write("hermes", [("get_weather", {"city": "Ulm"})]), SPECIAL_IDS)
    assert reader.finish_reason("stop", 1) == "stop"


def test_one_call_at_most_where_calls_may_not_be_parallel() -> None:
    calls = [("switch", {"on": True, "level": 2})] * 2
    for parallel in (True, False):
        _, params = constrained("glm45", tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        assert accepts(grammar(params), write("glm45", calls[:1]), SPECIAL_IDS)
        assert accepts(grammar(params), write("glm45", calls), SPECIAL_IDS) == parallel


@pytest.mark.parametrize(("tools_format", "name"), [("none", "f"), ("pythonic", "get-weather")])
def test_without_words_of_the_model_s_own_calls_are_a_json_list(tools_format: str, name: str) -> None:
    reader, params = constrained(tools_format, tools=[tool(name)], tool_choice="required")
    text = f'[{{"name": "{name}", "parameters": {{}}}}]'
    assert accepts(grammar(params), text)
    assert [(call.name, call.arguments) for call in whole(reader, text).calls] == [(name, "{}")]


def test_gpt_oss_calls_after_thoughts_of_its_own() -> None:
    reader, params = constrained("openai", tools=TOOLS, tool_choice=NAMED)
    text = '<|channel|>commentary to=functions.switch <|constrain|>json<|message|>{"on": false, "level": 1}'
    assert accepts(grammar(params), text, SPECIAL_IDS) and params.thinking is None
    assert whole(reader, text).calls[0].name == "switch"
    with pytest.raises(HTTPError, match="whose names are"):
        constrained("openai", tools=[tool("a b")], tool_choice="required")


@pytest.mark.parametrize("tools", [[TOOLS[0], tool("switch", SWITCH, strict=True)], TOOLS])
def test_strict_functions_and_allowed_tools_have_schemas_though_none_must_be_called(tools: Any) -> None:
    choice = "auto" if tools is not TOOLS else ONLY_SWITCH
    _, params = constrained("hermes", tools=tools, tool_choice=choice)
    assert accepts(grammar(params), "Just text.", SPECIAL_IDS)
    assert accepts(grammar(params), "Well. " + write("hermes", [("switch", {"on": True, "level": 1})]), SPECIAL_IDS)
    assert not accepts(grammar(params), write("hermes", [("switch", {"on": "yes", "level": 1})]), SPECIAL_IDS)
    weather = write("hermes", [("get_weather", {"city": "Ulm"})])
    assert accepts(grammar(params), weather, SPECIAL_IDS) == (tools is not TOOLS)


def test_free_answers_stay_free() -> None:
    strict = [tool("f", SWITCH, strict=True)]
    for fields in ({"tools": TOOLS}, {"tools": strict, "tool_choice": "none"}, {}):
        assert constrained("hermes", **fields)[1].structured_outputs is None
    assert constrained("none", tools=strict)[1].structured_outputs is None


@pytest.mark.parametrize("tools_format", ["hermes", "llama3_json"])
def test_the_operator_may_hold_every_call_to_its_schema(tools_format: str) -> None:
    odd = tool(
        "odd", {"type": "object", "properties": {"a": {"type": "integer", "no-such-keyword": 1}}, "required": ["a"]}
    )
    good, bad = (write(tools_format, [("odd", {"a": value})]) for value in (1, "x"))
    choice = read_tool_choice(request_of(tools=[odd]))
    for level, is_held, is_strict in (("auto", False, False), ("function", True, False), ("parameter", True, True)):
        formats = choose_formats("none", tools_format, None, level)
        _, found = enforced(formats, choice, Tokenizer(), only_one=False)
        assert (found is not None) == is_held
        if found is not None:
            assert accepts(found, good, SPECIAL_IDS) and not accepts(found, bad, SPECIAL_IDS)
            assert ('"lenient": false' in found) == is_strict


def test_other_forms_give_way_or_are_refused() -> None:
    form = StructuredOutputsParams(json={})
    schema = {"type": "json_schema", "json_schema": {"schema": {}}}
    _, params = constrained("hermes", tools=TOOLS, tool_choice="required", response_format=schema, form=form)
    assert "get_weather" in grammar(params)  # a response format is about content, of which there is none
    _, params = constrained("pythonic", tools=[tool("a-b")], response_format=schema, form=form)
    assert params.structured_outputs == form
    with pytest.raises(HTTPError, match="leave the other out"):
        constrained("hermes", tools=TOOLS, tool_choice="required", guided_json={}, form=form)


@pytest.mark.parametrize("tools_format", ["hermes", "qwen3_coder", "llama3_json", "openai"])
def test_beside_tools_a_response_format_is_that_of_answers(tools_format: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    form = StructuredOutputsParams(json=schema)
    reader, params = constrained(tools_format, tools=TOOLS, response_format=wanted, form=form)
    call = ("switch", {"on": True, "level": 1})
    if tools_format == "openai":
        written = '<|channel|>commentary to=functions.switch <|constrain|>json<|message|>{"on": true, "level": 1}'
        opening = "<|channel|>final<|message|>"
    else:
        written, opening = write(tools_format, [call]), ""
    assert accepts(grammar(params), written, SPECIAL_IDS) and accepts(
        grammar(params), opening + '{"n": 3}', SPECIAL_IDS
    )
    for text in ("Well.", '{"n": "x"}', written.replace("switch", "other")):
        assert not accepts(grammar(params), opening + text, SPECIAL_IDS)
    assert [each.name for each in whole(reader, written).calls] == ["switch"]
    answer = whole(reader, opening + '{"n": 3}')
    assert (answer.content, answer.calls) == ('{"n": 3}', [])


# --- a server ---


MORE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama4_pythonic", "none")]


@pytest.fixture(scope="module", params=["auto", "qwen3_coder", *MORE])
def demo(request: pytest.FixtureRequest) -> Iterator[DemoServer]:
    """The demo model, which is made to write formats that it has never seen, too."""
    server = DemoServer("--tool-call-parser", request.param)
    yield server
    assert server.end(signal.SIGTERM)[0] == 0


def ask(server: DemoServer, question: str, **fields: Any) -> tuple[str | None, list[tuple[str, Any]]]:
    """(finish reason, calls), which are the same whole and streamed."""
    fields = {"model": "quire-demo", "temperature": 0, "max_tokens": 160, "seed": 3, **fields}
    fields["messages"] = [{"role": "user", "content": question}]
    completions = server.openai().chat.completions
    choice = completions.create(**fields).choices[0]
    whole = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    reason, content, calls = None, "", list[list[str]]()
    for chunk in completions.create(**fields, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            if call.function.name:
                assert call.index == len(calls) and call.id
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (reason, content or None, [tuple(call) for call in calls]) == (
        choice.finish_reason,
        choice.message.content,
        whole,
    )
    return reason, [(name, json.loads(arguments)) for name, arguments in whole]


def test_a_server_s_answers_call_as_they_must(demo: DemoServer) -> None:
    reason, ((name, arguments),) = ask(demo, "Hello!", tools=TOOLS, tool_choice=NAMED)
    assert (reason, name) == ("stop", "switch")
    jsonschema.validate(arguments, SWITCH)
    only = [TOOLS[1]]
    reason, calls = ask(demo, "Hello!", tools=only, tool_choice="required", parallel_tool_calls=False, temperature=1)
    assert reason == "tool_calls" and len(calls) == 1
    jsonschema.validate(calls[0][1], SWITCH)
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    reason, calls = ask(demo, "What is 3 + 4?", tools=only, tool_choice=NAMED, extra_body=thinks)
    assert (reason, len(calls)) == ("stop", 1)
    jsonschema.validate(calls[0][1], SWITCH)


def test_the_demo_model_calls_what_it_was_asked_for(plain_demo: DemoServer) -> None:
    question = "What is the weather in Paris?"
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        _, calls = ask(plain_demo, question, tools=TOOLS, tool_choice=choice)
        assert calls == [("get_weather", {"city": "Paris"})]
    strict = [tool("get_weather", WEATHER, strict=True)]
    assert ask(plain_demo, question, tools=strict) == ("tool_calls", [("get_weather", {"city": "Paris"})])
    assert ask(plain_demo, "Hello!", tools=strict) == ("stop", [])
    tools = [{"name": "get_weather", "input_schema": WEATHER}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        body = {"model": "quire-demo", "max_tokens": 100, "temperature": 0, "tools": tools, "tool_choice": choice}
        answer = plain_demo.client.post(
            "/v1/messages", json={**body, "messages": [{"role": "user", "content": question}]}
        ).json()
        assert answer["stop_reason"] == "tool_use"
        assert answer["content"][-1]["input"] == {"city": "Paris"}
    bad = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool("f", {"properties": {"a": {"$ref": "#/nope"}}})],
    }
    refused = plain_demo.client.post("/v1/chat/completions", json={**bad, "tool_choice": "required"})
    assert refused.status_code == 400, refused.text
