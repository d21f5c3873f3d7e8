"""What a request's fields say about the form of its answer."""

from typing import Any

import msgspec
import pytest
from tests.oracles.demo_server import DemoServer
from tests.parsers.test_thinking import FORMATS as GPT_OSS
from tests.parsers.test_thinking import Tokenizer as Channels

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.openai.answers import answer_reader
from quire.entrypoints.openai.chat_generation import constrain_answer, find_thinking, limit_thinking
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.entrypoints.openai.sampling import form_field, naming_form, read_constraint
from quire.errors import RequestError
from quire.parsers.choice import AnswerFormats, choose_formats
from quire.parsers.thinking import harmony_thinking
from quire.sampling_params import SamplingParams, StructuredOutputsParams, Thinking

NULL = {"type": "null"}
WEATHER_TOOL = {"type": "function", "function": {"name": "get_weather"}}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}


def request_of(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatCompletionRequest)


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "", "guided_choice": []}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": NULL}}}, {"json": NULL}),
        ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": TAG}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, {"json": {}, "disable_any_whitespace": True}),
        ({"guided_json": {}, "guided_whitespace_pattern": " ?"}, {"json": {}, "whitespace_pattern": " ?"}),
        ({"guided_choice": ["a", "b"], "response_format": {"type": "text"}}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    ],
)  # fmt: skip
def test_fields_name_one_constraint(fields: dict[str, Any], constraint: dict[str, Any] | None) -> None:
    assert read_constraint(request_of(**fields)) == (StructuredOutputsParams(**constraint) if constraint else None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format and guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs and guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"response_format": {"type": "json_schema"}}, "an object with a `schema`"),
        ({"response_format": {"type": "structural_tag", "triggers": 5}, "structured_outputs": 5}, "must be an object"),
    ],
)
def test_fields_that_contradict_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((HTTPError, RequestError), match=words):
        read_constraint(request_of(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": 5},
        {"guided_regex": ["a"]},
        {"guided_choice": "a"},
        {"guided_grammar": {"a": 1}},
        {"structured_outputs": {"regex": 5}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
    ],
)
def test_what_is_no_form_is_refused_by_the_field_s_own_name(fields: dict[str, Any]) -> None:
    request = request_of(**fields)
    field = form_field(request)
    with pytest.raises(RequestError) as caught, naming_form(field):
        read_constraint(request)
    assert caught.value.param == field and str(caught.value).startswith(f"{field}: ")
    assert field.partition(".")[0] in fields


WRONG = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}
HELLO = [{"role": "user", "content": "hello"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": WRONG}}
WRONG_TOOL = {"type": "function", "function": {"name": "a", "parameters": WRONG}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "response_format": FORMAT}, "response_format.json_schema.schema"),
        ("/v1/completions", {"prompt": "a", "response_format": FORMAT}, "response_format.json_schema.schema"),
        ("/v1/chat/completions", {"messages": HELLO, "guided_json": WRONG}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": WRONG}}, "structured_outputs"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [WRONG_TOOL], "tool_choice": "required"}, "tools"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": WRONG}}},
         "text.format.schema"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9,
                          "output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
         "output_config.format.schema"),
        ("/api/chat", {"model": "quire-demo", "messages": HELLO, "format": WRONG}, "format"),
        ("/api/generate", {"model": "quire-demo", "prompt": "a", "raw": True, "format": WRONG}, "format"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"structured_outputs": {"json": WRONG}}},
         "sampling_params.structured_outputs"),
    ],
)  # fmt: skip
def test_a_wrong_schema_is_refused_by_the_name_that_was_sent(
    plain_demo: DemoServer, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    answer = plain_demo.client.post(path, json={"model": "quire-demo", "stream": stream, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    named = f"{field}.json" if field.endswith("structured_outputs") else field
    assert message.startswith(f"{named} cannot be used: ") and "nowhere" in message
    assert path in ("/v1/messages", "/api/chat", "/api/generate") or error["param"] == field
    assert field.startswith(("structured_outputs", "sampling_params")) or "structured_outputs" not in message


def test_anthropics_format_is_a_schema(plain_demo: DemoServer) -> None:
    for given, words in (
        ({"type": "xml"}, "output_config.format.type: 'xml'"),
        ({"type": "json_schema"}, "format.schema: "),
    ):
        body = {"model": "quire-demo", "max_tokens": 9, "messages": HELLO, "output_config": {"format": given}}
        answer = plain_demo.client.post("/v1/messages", json=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


class Words:
    """A tokenizer whose tokens are the words of a text, counted in a list."""

    known = ("<think>", "</think>", "hello", "<|channel|>final<|message|>")
    all_special_tokens: tuple[str, ...] = ()
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.known.index(text)]

    def token_to_id(self, token: str) -> int | None:
        return self.known.index(token) if token in self.known else None

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(self.known[token_id] for token_id in token_ids)


@pytest.mark.parametrize(
    ("formats", "prompt", "variables", "thinking"),
    [
        (choose_formats("qwen3", "none", None), [2, 0], {}, Thinking([1])),
        (choose_formats("qwen3", "none", None), [0, 1], {}, None),
        (choose_formats("qwen3", "none", None), [2], {}, Thinking([1], 0)),
        (choose_formats("qwen3", "none", None), [2], {"enable_thinking": False}, None),
        (choose_formats("deepseek_r1", "none", None), [2], {}, Thinking([1])),
        (AnswerFormats("openai_gptoss", "openai", is_harmony=True), [2], {}, Thinking([3])),
    ],
)
def test_thinking_is_found_where_answers_are_read_so(
    formats: AnswerFormats, prompt: list[int], variables: dict[str, Any], thinking: Thinking | None
) -> None:
    tokenizer = Words()
    reader = answer_reader(formats, request_of(chat_template_kwargs=variables), tokenizer, prompt)
    assert find_thinking(reader) == thinking


@pytest.mark.parametrize(
    ("fields", "may_call"),
    [
        ({}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"tools": [WEATHER_TOOL]}, True),
        ({"tools": [WEATHER_TOOL], "tool_choice": "none"}, False),
    ],
)
def test_a_budget_knows_the_channels_of_gpt_oss(fields: dict[str, Any], may_call: bool) -> None:
    tokenizer, params = Channels(), SamplingParams(thinking_token_budget=5)
    prompt = tokenizer.encode("<|start|>user<|message|>hi<|end|><|start|>assistant")
    request = request_of(**fields)
    reader = answer_reader(GPT_OSS, request, tokenizer, prompt)  # pyright: ignore[reportArgumentType]
    params.structured_outputs = read_constraint(request)
    if not may_call:
        constrain_answer(params, reader)
    limit_thinking(params, GPT_OSS, reader, prompt)
    assert params.thinking == harmony_thinking(tokenizer, may_call=may_call) and params.thinking_token_budget == 5
    answered = tokenizer.encode("<|start|>assistant<|channel|>final<|message|>")
    limit_thinking(params, GPT_OSS, reader, answered)
    assert params.thinking_token_budget is None, "the answer has begun"


def test_a_budget_and_a_form_that_covers_thoughts_exclude_one_another() -> None:
    tokenizer = Channels()
    reader = answer_reader(GPT_OSS, request_of(tools=[WEATHER_TOOL]), tokenizer, [])  # pyright: ignore[reportArgumentType]
    params = SamplingParams(thinking_token_budget=5, structured_outputs=StructuredOutputsParams(grammar="start: 'a'"))
    with pytest.raises(RequestError, match="thinking_token_budget cannot be kept") as caught:
        limit_thinking(params, GPT_OSS, reader, [])
    assert caught.value.param == "thinking_token_budget"


def test_the_openai_package_parses_a_demo_server_s_answers(plain_demo: DemoServer) -> None:
    import pydantic

    class Person(pydantic.BaseModel):
        name: str
        age: int

    client = plain_demo.openai()
    messages: Any = [{"role": "user", "content": "Make JSON with name Bob and age 7"}]
    parsed = client.chat.completions.parse(
        model="quire-demo", messages=messages, response_format=Person, max_tokens=100, temperature=0
    )
    assert parsed.choices[0].message.parsed == Person(name="Bob", age=7)
    chunks = client.chat.completions.create(
        model="quire-demo", messages=messages, stream=True, seed=1,
        extra_body={"structured_outputs": {"choice": ["red", "green"]},
                    "chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) in ("red", "green")
    bad = plain_demo.client.post("/v1/completions", json={"prompt": "a", "guided_regex": "(?=a)"})
    assert bad.status_code == 400 and "look-around" in bad.json()["error"]["message"]
    assert len(plain_demo.complete(prompt="a", guided_regex=r"\d{5}")["choices"][0]["text"]) == 5
