"""Every format's grammar: what is written from valid arguments is accepted and read back, what is not valid is refused, and
whatever a grammar allows is a valid call."""

import json
import string
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.oracles.installed_plugins import restore
from tests.parsers.writing import SPECIAL_IDS, accepts, tokens_of, walk, write

from quire.parsers.bodies import Addressed, JsonObject
from quire.parsers.call_grammar import calls_only, harmony_calls, text_and_calls
from quire.parsers.choice import choose_formats
from quire.parsers.formats import PLAIN, TOOLS, ToolFormat
from quire.parsers.offered import offered_functions
from quire.parsers.pythonic import Pythonic
from quire.parsers.schemas import Inexpressible
from quire.parsers.stream import parse_answer
from quire.parsers.tags import Tags

TAGS = tuple(name for name, each in TOOLS.items() if isinstance(each.body, Tags))
PYTHON = tuple(name for name, each in TOOLS.items() if isinstance(each.body, Pythonic))
MARKED = [name for name in TOOLS if not TOOLS[name].bare]
BARE = [name for name in TOOLS if TOOLS[name].bare]
KEYWORDS = {
    *(
        "type",
        "properties",
        "required",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "items",
        "$ref",
        "$defs",
        "pattern",
    ),
    *("minLength", "maxLength", "additionalProperties", "string", "object", "a", "not", "default", "format"),
}
MANY = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\r\x7f"), max_size=12).filter(
    lambda text: not any(token in text for token in SPECIAL_IDS)
)
TEXT = PLAIN_TEXT.map(lambda text: text.strip("\n")).filter(lambda text: text != "null")
NAMES = (
    st.text(string.ascii_lowercase + "_", min_size=1, max_size=6)
    .filter(lambda name: name.isidentifier())
    .map(
        lambda name: name + "_x"  # no keyword of Python's
    )
)
DEFINITIONS = {"Color": {"type": "string", "enum": ["red", "dark red", 'bl"ue\\']}}
KINDS: list[tuple[dict[str, Any], st.SearchStrategy[Any], Any]] = [
    ({"type": "string"}, TEXT, None),
    ({"type": "string", "description": "a ::= b"}, TEXT, None),
    ({"$ref": "#/$defs/Color"}, st.sampled_from(DEFINITIONS["Color"]["enum"]), "green"),
    ({"enum": ["a", "ab", "b/c"]}, st.sampled_from(["a", "ab", "b/c"]), "c"),
    ({"const": "only"}, st.just("only"), "other"),
    ({"type": "string", "pattern": r"^[a-z]{2}/\d+$"}, st.from_regex(r"\A[a-z]{2}/[0-9]+\Z"), "ab/"),
    ({"type": "string", "minLength": 2, "maxLength": 4}, TEXT.filter(lambda text: 2 <= len(text) <= 4), "abcde"),
    ({"type": "integer"}, st.integers(-(10**9), 10**9), 1.5),
    ({"type": "integer", "minimum": 3, "maximum": 12}, st.integers(3, 12), 13),
    ({"type": "number"}, st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 4)), [1]),
    ({"type": "boolean"}, st.booleans(), 7),
    ({"type": ["string", "null"]}, TEXT, None),
    ({"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]}, st.sampled_from(["x", None]), "y"),
    ({"type": "array", "items": {"type": "string"}}, st.lists(PLAIN_TEXT, max_size=3), [3]),
    ({"type": "array", "items": {"$ref": "#/$defs/Color"}, "maxItems": 1}, st.just(["red"]), ["red", "red"]),
    (
        {"type": "object", "properties": {"on": {"type": "boolean"}, "n": {"type": "null"}}, "required": ["on"]},
        st.booleans().flatmap(lambda on: st.sampled_from([{"on": on}, {"on": on, "n": None}])),
        {"n": None},
    ),
]
"""(schema, valid values, a value that is not); properties in the schema's order, which the grammar prescribes."""


@st.composite
def offers(draw: Any) -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
    """Functions with random parameters, and valid calls of them."""
    tools, calls = [], []
    for function in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        properties, required, arguments = {}, [], {}
        for key in draw(st.lists(NAMES, max_size=4, unique=True)):
            properties[key], values, _ = draw(st.sampled_from(KINDS))
            if draw(st.booleans()):
                required.append(key)
            if key in required or draw(st.booleans()):
                arguments[key] = draw(values)
        schema = {"type": "object", "properties": properties, "required": required, "$defs": DEFINITIONS}
        tools.append({"type": "function", "function": {"name": function, "parameters": schema}})
        calls.append((function, arguments))
    return tools, calls


def formats_of(name: str) -> dict[str, Any]:
    """The format of calls, and of the reasoning where both stand in messages of one kind."""
    return {"tools": TOOLS[name], "reasoning": choose_formats("none", name, None).reasoning}


def read(text: str, name: str, tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    answer = parse_answer(text, offered=tools, **formats_of(name))
    assert answer.content.strip() == ""
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def grammar_of(name: str, tools: Any, special: Any = None, only_one: bool = False) -> str:
    return calls_only(TOOLS[name], offered_functions(tools), special or {}, only_one)


def tool_of(properties: dict[str, Any], required: list[str] | None = None, name: str = "f", **more: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": required or [], "$defs": DEFINITIONS, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize("special", [{}, SPECIAL_IDS], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("name", TOOLS)
@given(offer=offers())
@MANY
def test_valid_calls_are_accepted_and_read_back(name: str, special: dict[str, int], offer: Any) -> None:
    tools, calls = offer
    text = write(name, calls, special)
    assert read(text, name, tools) == calls
    assert accepts(grammar_of(name, tools, special), text, special)
    assert accepts(grammar_of(name, tools, special, only_one=True), text, special) == (len(calls) == 1)
    assert accepts(grammar_of(name, tools, special, only_one=True), "\n" + write(name, calls[:1], special), special)


@pytest.mark.parametrize("name", TOOLS)
def test_other_functions_and_plain_text_are_refused(name: str) -> None:
    grammar = grammar_of(name, [tool_of({}), tool_of({}, name="ff")])
    assert accepts(grammar, write(name, [("f", {}), ("ff", {})]))
    for text in ("", "Well.", write(name, [("g", {})]), write(name, [("fff", {})]), write(name, [("f", {"a": 1})])):
        assert not accepts(grammar, text)
    assert not accepts(grammar, "Well. " + write(name, [("f", {})]))


@pytest.mark.parametrize(
    "name",
    [
        *("hermes", "kimi_k2", "qwen3_coder", "glm45", "minimax_m2", "pythonic", "olmo3"),
        *("deepseek_v32", "kimi_k3", "minimax_m3", "gemma4", "functiongemma", "dots", "k2_horizon", "minicpm5"),
    ],
)
@pytest.mark.parametrize("kind", range(len(KINDS)))
@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_each_kind_of_parameter_is_held_to_its_schema(name: str, kind: int, data: Any) -> None:
    schema, values, wrong = KINDS[kind]
    tools = [tool_of({"a": schema, "b": {"type": "integer"}}, ["a"])]
    value = data.draw(values)
    grammar = grammar_of(name, tools)
    for arguments in ({"a": value}, {"a": value, "b": 3}):
        text = write(name, [("f", arguments)])
        assert accepts(grammar, text)
        assert read(text, name, tools) == [("f", arguments)]
    bad = [{}, {"b": 3}, {"a": value, "b": "x"}, {"a": value, "c": 1}]
    if wrong is not None and not (
        name == "minimax_m3" and schema.get("items") == {"type": "string"}
    ):  # any text is a string
        bad.append({"a": wrong})
    for arguments in bad:
        assert not accepts(grammar, write(name, [("f", arguments)])), arguments


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("special", [{}, SPECIAL_IDS], ids=["text", "tokens"])
def test_whatever_the_grammar_allows_is_a_valid_call(name: str, special: dict[str, int]) -> None:
    properties = {f"p{index}": schema for index, (schema, _, _) in enumerate(KINDS) if schema != {"type": "integer"}}
    tools = [
        tool_of({key: properties[key] for key in list(properties)[:5]}, ["p0", "p2"], "first"),
        tool_of({key: properties[key] for key in list(properties)[5:]}, ["p9"], "second"),
    ]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    grammar, finished = grammar_of(name, tools, special), 0
    for seed in range(10):
        text = walk(grammar, seed)
        if text is not None:
            finished += 1
            found = read(text, name, tools)
            assert found
            for function, arguments in found:
                jsonschema.validate(arguments, schemas[function])
    assert finished


@pytest.mark.parametrize("special", [{}, SPECIAL_IDS], ids=["text", "tokens"])
@pytest.mark.parametrize("name", MARKED)
def test_free_text_obliges_to_nothing_until_a_marker_begins_a_call(name: str, special: dict[str, int]) -> None:
    tools = [tool_of({"a": {"type": "integer"}}, ["a"]), tool_of({}, name="now")]
    grammar = text_and_calls(TOOLS[name], offered_functions(tools), special, only_one=False)
    good = write(name, [("f", {"a": 1})], special)
    for text in ("", "Just text, <b>bold</b>.", good, f"Let me see.\n{good}", f"{good}\n"):
        assert accepts(grammar, text, special), text
    for wrong in ([("f", {"a": "x"})], [("f", {})], [("g", {})]):
        assert not accepts(grammar, f"Look: {write(name, wrong, special)}", special)
    both = write(name, [("f", {"a": 1}), ("now", {})], special)
    assert accepts(grammar, both, special)
    one = text_and_calls(TOOLS[name], offered_functions(tools), special, only_one=True)
    assert accepts(one, f"Well. {good}", special)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kimi_k3", "<|open|>response<|sep|>Well.<|close|>response<|sep|>"),
        ("cohere_command4", "<|START_RESPONSE|>Well.<|END_RESPONSE|>"),
        ("inkling", "<|content_text|>Well.<|end_message|><|message_model|>"),
        ("muse", "to=commentary<|message|>Well.<|eom|><|start|>assistant "),
        ("muse_glimmer", "to=user<|message|>Well.<|eom|><|start|>assistant "),
    ],
)
@pytest.mark.parametrize("special", [{}, SPECIAL_IDS], ids=["text", "tokens"])
def test_free_text_may_stand_in_the_models_frames(name: str, text: str, special: dict[str, int]) -> None:
    tools = [tool_of({"a": {"type": "integer"}}, ["a"])]
    grammar = text_and_calls(TOOLS[name], offered_functions(tools), special, only_one=False)
    good, bad = write(name, [("f", {"a": 1})], special), write(name, [("f", {"a": "x"})], special)
    assert accepts(grammar, text, special) and accepts(grammar, text + good, special)
    assert not accepts(grammar, text + bad, special)
    answer = parse_answer(text + good, offered=tools, **formats_of(name))
    assert [call.arguments for call in answer.calls] == ['{"a": 1}'] and answer.content.strip() in ("Well.", text)


@pytest.mark.parametrize("special", [{}, SPECIAL_IDS], ids=["text", "tokens"])
@pytest.mark.parametrize("name", BARE)
def test_without_a_marker_the_first_character_tells_calls_from_text(name: str, special: dict[str, int]) -> None:
    tools = [tool_of({"a": {"type": "integer"}}, ["a"]), tool_of({}, name="now")]
    grammar = text_and_calls(TOOLS[name], offered_functions(tools), special, only_one=False)
    calls = write(name, [("f", {"a": 1}), ("now", {})], special)
    for text in ("", "\n", "Just text, [1] and {2}.", "  Yes.", calls, f"\n{calls}\n"):
        assert accepts(grammar, text, special), text
        assert parse_answer(text, tools=TOOLS[name], offered=tools).content.strip() == (
            "" if calls in text else text.strip()
        )
    opening = "[" if "python" in name else "{"
    for text in (f"{opening}1]", f"{opening} see", f"{calls} and more", write(name, [("f", {"a": "x"})], special)):
        assert not accepts(grammar, text, special), text
    for marker in set(TOOLS[name].begin) - set(TOOLS[name].direct):
        good, bad = f"Look: {marker}{calls}", f"Look: {marker}{write(name, [('f', {})], special)}"
        assert accepts(grammar, good, special) and not accepts(grammar, bad, special)
        assert len(parse_answer(good, tools=TOOLS[name], offered=tools).calls) == 2


@pytest.mark.parametrize("special", [{}, SPECIAL_IDS], ids=["text", "tokens"])
@pytest.mark.parametrize("name", TOOLS)
def test_whatever_is_read_as_a_call_beside_free_text_follows_its_schema(name: str, special: dict[str, int]) -> None:
    tools = [tool_of({"p0": {"type": "integer"}, "p1": KINDS[2][0]}, ["p0"])]
    schema = tools[0]["function"]["parameters"]
    grammar, found = text_and_calls(TOOLS[name], offered_functions(tools), special, only_one=False), 0
    beginnings = ["", *TOOLS[name].begin, *TOOLS[name].section[:1], *(["[", "{", "\n["] if TOOLS[name].bare else ())]
    if isinstance(body := TOOLS[name].body, Addressed):
        beginnings.append(f"{TOOLS[name].begin[0]}f{body.after}{body.opening}")
    for seed, beginning in enumerate(beginnings * 3):
        text = walk(grammar, seed, begin=tokens_of(beginning, special))
        answer = parse_answer(text or "", offered=tools, **formats_of(name))
        found += len(answer.calls)
        for call in answer.calls:
            assert call.name == "f"
            jsonschema.validate(json.loads(call.arguments), schema)
    assert found


def test_models_without_a_format_write_a_list() -> None:
    functions = offered_functions([tool_of({"a": {"type": "string"}}, ["a"])])
    grammar = calls_only(PLAIN, functions, {}, only_one=False)
    text = '[{"name": "f", "parameters": {"a": "x"}}, {"name": "f", "parameters": {"a": "y"}}]'
    assert accepts(grammar, text) and not accepts(grammar, "[]")
    found = parse_answer(text, tools=PLAIN, offered=None)
    assert [call.arguments for call in found.calls] == ['{"a": "x"}', '{"a": "y"}']


@pytest.mark.parametrize("special", [{}, SPECIAL_IDS], ids=["text", "tokens"])
def test_harmony_calls_come_after_thoughts(special: dict[str, int]) -> None:
    functions = offered_functions([tool_of({"a": {"type": "integer"}}, ["a"])])
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    thought = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>Four."
    forced, free = (harmony_calls(functions, special, must_call) for must_call in (True, False))
    for text in (call, thought + call, thought + thought + call):
        assert accepts(forced, text, special) and accepts(free, text, special)
        found = parse_answer(text, is_harmony=True)
        assert [(each.name, each.arguments) for each in found.calls] == [("f", '{"a": 1}')]
    assert accepts(free, thought + answer, special) and not accepts(forced, thought + answer, special)
    for text in (call.replace("1", '"x"'), call.replace("functions.f", "functions.g"), thought, ""):
        assert not accepts(forced, text, special)


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("pythonic", tool_of({}, name="get-weather")),
        ("pythonic", tool_of({"from": {"type": "string"}})),
        ("pythonic", {"name": "f", "parameters": {"type": "object"}}),
        ("qwen3_coder", tool_of({"a>b": {"type": "string"}})),
        ("qwen3_coder", tool_of({"a": {"type": "integer"}}, anyOf=[{"required": ["a"]}])),
        ("qwen3_coder", tool_of({"a": {"type": "string", "enum": ["x</parameter>"]}})),
        ("glm45", tool_of({"a": {"type": "array", "items": {"$ref": "#/properties/b"}}, "b": {"type": "string"}})),
        ("kimi_k2", tool_of({}, name="a b")),
    ],
)
def test_what_a_format_has_no_words_for_is_said(name: str, tool: Any) -> None:
    with pytest.raises(Inexpressible):
        grammar_of(name, [tool])


def test_a_function_without_named_parameters_takes_any_text_in_tags() -> None:
    tools = [{"name": "f", "parameters": {"type": "object"}}]
    for name in TAGS:
        if name == "poolside_v1":
            continue  # nothing says that "1" is text
        text = write(name, [("f", {"x": "1", "y y": "two"})])
        assert accepts(grammar_of(name, tools), text)
        assert read(text, name, tools) == [("f", {"x": "1", "y y": "two"})]


def test_null_is_null_where_the_schema_allows_it() -> None:
    tools = [tool_of({"a": {"type": ["string", "null"]}, "b": {"type": "string"}})]
    text = write("qwen3_coder", [("f", {"a": "null", "b": "null"})])
    assert read(text, "qwen3_coder", tools) == [("f", {"a": None, "b": "null"})]
    assert read(write("glm45", [("f", {"a": "nul"})]), "glm45", tools) == [("f", {"a": "nul"})]


def test_annotations_and_unknown_keywords_do_not_stand_in_the_way() -> None:
    properties = {"description": {"type": "string", "format": "strange", "x-note": 1}, "title": {"type": "integer"}}
    grammar = grammar_of("hermes", [tool_of(properties, ["description"], description="a ::= b", uniqueItems=True)])
    assert "::=" not in grammar
    assert accepts(grammar, write("hermes", [("f", {"description": "x", "title": 1})]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(KEYWORDS)), inner, max_size=4),
    max_leaves=12,
)


@given(schema=st.dictionaries(st.sampled_from(sorted(KEYWORDS)), JSON, max_size=6))
@settings(max_examples=150, deadline=None)
def test_no_schema_breaks_the_derivation(schema: Any) -> None:
    for tools in ([{"name": "f", "parameters": schema}], [tool_of({"a": schema}, ["a"])]):
        for name in ("hermes", "deepseek_v31", "qwen3_coder", "glm45", "pythonic"):
            try:
                assert grammar_of(name, tools).startswith("%llguidance")
            except Inexpressible:
                assert name in (*TAGS, *PYTHON)


@pytest.mark.parametrize("name", ["qwen3_coder", "deepseek_v32", "kimi_k3"])
def test_a_type_beside_alternatives_without_types_is_the_values_type(name: str) -> None:
    choices = {"type": "object", "properties": {"x": {"type": "integer"}}, "anyOf": [{"required": ["x"]}]}
    tools, calls = [tool_of({"a": choices}, ["a"])], [("f", {"a": {"x": 3}})]
    text = write(name, calls)
    assert accepts(grammar_of(name, tools), text) and read(text, name, tools) == calls


def test_a_format_that_a_plugin_adds_is_read_and_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    restore(monkeypatch, TOOLS)
    TOOLS.register("mine", ToolFormat(JsonObject(), begin=("<call>",), end=("</call>",)))
    assert choose_formats("none", "mine", None).tools is TOOLS["mine"]
    tools = [tool_of({"a": {"type": "integer"}}, ["a"])]
    text = '<call>{"name": "f", "arguments": {"a": 1}}</call>'
    assert accepts(grammar_of("mine", tools), text) and not accepts(grammar_of("mine", tools), text.replace("1", "[]"))
    assert read(text, "mine", tools) == [("f", {"a": 1})]
