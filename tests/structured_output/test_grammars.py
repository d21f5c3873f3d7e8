"""A random walk through a grammar's masks ends in a text of the wanted form, whatever the form and the walk."""

import json
import random
import re
import string
import sys
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import StructuredOutputsConfig, limits
from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams, Thinking
from quire.structured_output import rows
from quire.structured_output.grammars import Grammars, RowGrammar
from quire.structured_output.vocabulary import Vocabulary

EOS, SPECIAL, HOLE = 256, 257, 258
WORDS = [b'{"', b'": ', b'",', b"true", b"null", b"ab", b"12", b"]}", b"\n\n", "é".encode(), b"\x00\x1f", b"\n"]
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<eos>", b"<special>", b""] + WORDS
VOCABULARY = Vocabulary(TOKENS, [SPECIAL], lambda text: [SPECIAL])  # never right: the longest tokens serve
GRAMMARS = Grammars(StructuredOutputsConfig(backend="guidance"))


def start(**fields: Any) -> RowGrammar:
    params = StructuredOutputsParams(**fields)
    GRAMMARS.check(params, [EOS], lambda: VOCABULARY)
    return GRAMMARS.start(params, [EOS], lambda: VOCABULARY)


def allowed_after(row: RowGrammar, output: list[int]) -> list[int]:
    masks_NW = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    assert GRAMMARS.begin_fill([(row, output)], masks_NW).finish() == {}
    bits = np.unpackbits(masks_NW.view(np.uint8)[0], bitorder="little")
    return np.flatnonzero(bits[: len(TOKENS)]).tolist()


def walk(row: RowGrammar, seed: int, most: int = 400) -> str | None:
    """A text that random choices lead to; None where they have not come to an end. Inclined to end what may end."""
    rng, output = random.Random(seed), []
    while len(output) < most:
        allowed = allowed_after(row, output)
        assert SPECIAL not in allowed and HOLE not in allowed
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return b"".join(TOKENS[token_id] for token_id in output).decode()
        closing = [token_id for token_id in allowed if TOKENS[token_id] in (b'"', b"}", b"]")]
        choices = closing if closing and rng.random() < 0.4 else allowed
        output.append(rng.choice([token_id for token_id in choices if token_id != EOS]))
    return None


names = st.text(string.ascii_letters + '_é "\\', min_size=1, max_size=6)


def integers(low: int, more: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": low + more}


def texts(least: int, more: int) -> dict[str, Any]:
    return {"type": "string", "minLength": least, "maxLength": least + more}


leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(integers, st.integers(-99, 99), st.integers(0, 200)),
    st.builds(texts, st.integers(0, 4), st.integers(0, 9)),
    st.lists(st.one_of(names, st.integers(-9, 9), st.none()), min_size=1, max_size=4).map(lambda enum: {"enum": enum}),
    st.just({"type": "string", "pattern": "^[a-f]{2,4}$"}),
    st.one_of(names, st.booleans()).map(lambda value: {"const": value}),
)


def objects(properties: dict[str, Any], optional: int) -> dict[str, Any]:
    required = list(properties)[: max(0, len(properties) - optional)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(objects, st.dictionaries(names, inner, max_size=3), st.integers(0, 2)),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_json_validates_against_its_schema(schema: dict[str, Any], seed: int) -> None:
    text = walk(start(json=schema, disable_any_whitespace=True), seed)
    assert text is not None
    jsonschema.validate(json.loads(text), schema)


@settings(max_examples=40, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_forced_tokens_are_those_that_masks_would_leave_alone(schema: dict[str, Any], seed: int) -> None:
    row, rng = start(json=schema, disable_any_whitespace=True), random.Random(seed)
    output: list[int] = []
    forced: list[int] = []
    while EOS not in output and len(output) < 100:
        found = GRAMMARS.forced([(row, output)]).get(0, [])
        assert EOS not in found
        assert found[: len(forced)] == forced[: len(found)]
        forced = found
        allowed = allowed_after(row, output)
        if forced:
            assert allowed == [forced.pop(0)]
        output.append(rng.choice(allowed))


def test_a_key_is_forced_and_a_thought_is_not() -> None:
    person = {"type": "object", "properties": {"nameofit": {"const": "x"}}, "required": ["nameofit"]}
    params = StructuredOutputsParams(json=person, disable_any_whitespace=True)
    row = GRAMMARS.start(params, [EOS], lambda: VOCABULARY, Thinking([7]))
    assert GRAMMARS.forced([(row, [])]) == GRAMMARS.forced([(row, [5, 6])]) == {}
    (forced,) = GRAMMARS.forced([(row, [5, 6, 7])]).values()
    assert b"".join(TOKENS[token_id] for token_id in forced).startswith(b'{"nameofit":')
    assert GRAMMARS.forced([(row, [5, 6, 7, *forced])]) == {}  # what may come next can be divided in two ways
    assert GRAMMARS.forced([(row, [5, 6, 7, *forced, 0])]) == {}  # it has left its grammar


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_object_is_json_without_raw_control_characters(seed: int) -> None:
    text = walk(start(json_object=True), seed)
    if text is not None:
        assert isinstance(json.loads(text, strict=True), dict)


pieces = st.one_of(
    st.text(string.ascii_letters + string.digits + " /-_", min_size=1, max_size=3).map(re.escape),
    st.sampled_from([r"\d", r"\w", r"\s", "[a-f]", "[^a-y]", "."]),
)
regexes = st.recursive(
    pieces,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["?", "{2,3}", "{1,4}", "{0,4}"])),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(regex=regexes, seed=st.integers(0, 2**32))
def test_a_regex_matches_the_whole_text(regex: str, seed: int) -> None:
    text = walk(start(regex=regex), seed)
    assert text is not None and re.fullmatch(regex, text)


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(choices=st.lists(words, min_size=1, max_size=9), seed=st.integers(0, 99))
def test_a_choice_is_one_of_the_choices(choices: list[str], seed: int) -> None:
    assert walk(start(choice=choices), seed) in choices


def test_structural_tags_bind_only_what_stands_between_them() -> None:
    tag = {
        "structures": [{"begin": "<f=a>", "schema": {"enum": [1, 22]}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    row, said = start(structural_tag=tag), list(b"free <f")
    assert len(allowed_after(row, said)) > 150
    said += list(b"=")
    assert allowed_after(row, said) == [ord("a")]
    said += list(b"a>")
    assert set(allowed_after(row, said)) >= {ord("1"), ord("2")} and ord("3") not in allowed_after(row, said)
    said += list(b"22</f>")
    assert EOS in allowed_after(row, said) and len(allowed_after(row, said)) > 150


def test_options_close_objects_and_forbid_whitespace() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "null"}}}}}
    closed = start(json=json.dumps(schema), disable_additional_properties=True, disable_any_whitespace=True)
    for seed in range(20):
        text = walk(closed, seed) or ""
        assert text in ("{}", '{"a":{}}', '{"a":{"b":null}}')
        closed = start(json=json.dumps(schema), disable_additional_properties=True, disable_any_whitespace=True)
    assert ord(" ") in allowed_after(start(json=schema), list(b"{"))
    assert ord("\n") not in allowed_after(start(json=schema, whitespace_pattern=" ?"), list(b"{"))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"regex": "(?=a)b"}, "regex", "look-around"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"grammar": 'start: "a'}, "grammar", "lexer error"),
        ({"grammar": "root ::= ("}, "grammar", "not EBNF"),
        ({"json": {"type": "thing"}}, "json", "thing"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json", "uniqueItems"),
        ({"json": {"$ref": "http://example.com/x"}}, "json", "not present"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "json", "nsatisfiable"),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag", "pip install 'xgrammar>=0.2'"),
        (
            {"structural_tag": {"structures": [{"begin": "a", "end": "b"}], "triggers": ["x"]}},
            "structural_tag",
            "no trigger",
        ),
        ({"structural_tag": {"structures": [5], "triggers": ["x"]}}, "structural_tag", "begin"),
        ({"choice": ["\ud800"]}, "choice", "surrogates"),
        ({"json": {"$ref": "#"}}, "json", "no text"),
        ({"json": {"$ref": "#/$defs/nope"}}, "json", "nope"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "json", "minLength (5)"),
        ({"json": {"type": "array", "minItems": 5, "maxItems": 2}}, "json", "minItems (5)"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "json", "'a'"),
        ({"json": {"type": "string", "maxLength": 10**30}}, "json", "ints"),
        ({"json": {"type": "string", "maxLength": "5"}}, "json", "maxLength"),
        ({"json": {"type": "string", "format": "nonsense"}}, "json", "nonsense"),
        ({"json": {"additionalProperties": 5}}, "json", "object or boolean"),
        ({"json": {"enum": []}}, "json", "empty"),
        ({"json": False}, "json", "not"),
        ({"regex": r"(a)\1"}, "regex", "backreferences"),
        ({"json": {"const": "x" * (limits.MAX_GRAMMAR_BYTES + 1)}}, "structured_outputs", "bytes"),
    ],
)
def test_a_wrong_form_is_refused_with_its_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        start(**fields)
    assert caught.value.param == param and words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"json": True}, "[["),
        ({"json": {"type": "string", "maxLength": 100_000}}, '"abc'),
        ({"json": {"type": "string", "minLength": 100_000}}, '"abc'),
        ({"json": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 100_000}}, '"abc'),
        ({"json": {"type": "array", "items": {}, "minItems": 10**9}}, "[1,2"),
        ({"json": {"enum": [f"value {number}" for number in range(2000)]}}, '"value 19'),
        ({"json": {"additionalProperties": {"type": "integer"}}}, '{"a":1,"b":2'),
        ({"json": {"type": "string", "pattern": "^[\\u00e9a]+$"}}, '"aa'),
        ({"json": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}}, "[[[null,["),
        ({"regex": "((a{1,100}){1,100}){1,100}"}, "aaaa"),
        ({"regex": "(a|aa)+(a*)*b"}, "aaab"),
        ({"regex": ".*a.{40}"}, "aaab"),
        ({"choice": ["\x00", "\x7f"]}, "\x00"),
    ],
)
def test_dear_forms_can_be_followed(fields: dict[str, Any], begin: str) -> None:
    row, output = start(**fields), []
    for byte in begin.encode():
        assert byte in allowed_after(row, output)
        output.append(byte)
    assert allowed_after(row, output)


def test_a_row_that_leaves_its_grammar_is_told_and_harms_no_other() -> None:
    good, bad = start(regex="ab"), start(regex="ab")
    masks_NW = np.zeros((2, -(-len(TOKENS) // 32)), dtype=np.int32)
    errors = GRAMMARS.begin_fill([(good, list(b"a")), (bad, list(b"x"))], masks_NW).finish()
    assert list(errors) == [1] and "left its grammar" in errors[1]
    assert allowed_after(good, list(b"a")) == [ord("b")]


def test_a_text_without_alternative_has_its_tokenizer_s_tokens() -> None:
    apart = Vocabulary(TOKENS, [SPECIAL], lambda text: list(text.encode()))
    params, grammars = StructuredOutputsParams(regex="ab"), Grammars()
    masks_NW = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    assert grammars.begin_fill([(grammars.start(params, [EOS], lambda: apart), [])], masks_NW).finish() == {}
    assert np.flatnonzero(np.unpackbits(masks_NW.view(np.uint8)[0], bitorder="little")).tolist() == [ord("a")]
    assert allowed_after(start(regex="ab"), []) == [TOKENS.index(b"ab")]


def test_thinking_is_free_and_its_answer_is_not() -> None:
    params, end = StructuredOutputsParams(regex="ab"), list(b"</t>")
    inside = GRAMMARS.start(params, [EOS], lambda: VOCABULARY, Thinking(end))
    said = list(b"ab < </t")
    assert len(allowed_after(inside, said)) == len(TOKENS)
    said += list(b">")
    assert allowed_after(inside, said) == [TOKENS.index(b"ab")]
    assert allowed_after(inside, [*said, ord("a")]) == [ord("b")]

    resumed = GRAMMARS.start(params, [EOS], lambda: VOCABULARY, Thinking(end))
    assert allowed_after(resumed, [*said, ord("a")]) == [ord("b")]

    free_to = GRAMMARS.start(params, [EOS], lambda: VOCABULARY, Thinking(end, SPECIAL))
    assert allowed_after(free_to, []) == [SPECIAL, TOKENS.index(b"ab")]
    assert len(allowed_after(free_to, [SPECIAL])) == len(TOKENS)
    assert allowed_after(free_to, [SPECIAL, *end]) == [TOKENS.index(b"ab")]
    fresh = GRAMMARS.start(params, [EOS], lambda: VOCABULARY, Thinking(end, SPECIAL))
    assert GRAMMARS.forced([(fresh, [])]) == {}, "it may think first"
    at_once = GRAMMARS.start(params, [EOS], lambda: VOCABULARY, Thinking(end, SPECIAL))
    assert allowed_after(at_once, [ord("a"), ord("b")]) == [EOS]


def test_a_marker_of_several_tokens_that_begins_to_think_is_written_to_its_end() -> None:
    params, end = StructuredOutputsParams(regex="ab"), list(b"</t")
    row = GRAMMARS.start(params, [EOS], lambda: VOCABULARY, Thinking(end, SPECIAL, rest=list(b"t>")))
    assert allowed_after(row, []) == [SPECIAL, TOKENS.index(b"ab")]
    assert GRAMMARS.forced([(row, [])]) == {}
    assert allowed_after(row, [SPECIAL]) == [ord("t")]
    assert allowed_after(row, [SPECIAL, ord("t")]) == [ord(">")]
    assert len(allowed_after(row, [SPECIAL, *b"t>"])) == len(TOKENS)
    assert allowed_after(row, [SPECIAL, *b"t>ab", *end]) == [TOKENS.index(b"ab")]


def test_a_grammar_is_compiled_once_for_all_who_ask_at_the_same_time() -> None:
    grammars, loads = Grammars(), []

    def load() -> Vocabulary:
        loads.append(1)
        return VOCABULARY

    params = StructuredOutputsParams(regex="a+")
    threads = [threading.Thread(target=grammars.check, args=(params, [EOS], load)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert len(grammars._kept) == 1


def test_what_the_first_request_waits_for_can_be_done_before() -> None:
    grammars, was_read = Grammars(), threading.Event()

    def load() -> Vocabulary:
        was_read.set()
        return VOCABULARY

    grammars.read_ahead(lambda: [EOS], load)
    assert was_read.wait(60)
    grammars.check(StructuredOutputsParams(regex="a"), [EOS], lambda: pytest.fail("read again"))


def test_reading_ahead_harms_nobody_where_it_cannot_be_done() -> None:
    grammars, reads = Grammars(), []
    grammars.read_ahead(list, lambda: pytest.fail("no request can use it"))
    grammars.read_ahead(lambda: [EOS], lambda: reads.append(1) or pytest.fail("unreadable"))
    grammars.check(StructuredOutputsParams(regex="a"), [EOS], lambda: VOCABULARY)
    assert reads == [1]


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(RequestError, match="end-of-sequence"):
        GRAMMARS.check(StructuredOutputsParams(regex="a"), [], lambda: VOCABULARY)


def test_a_slow_compilation_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_GRAMMAR_SECONDS", 0.01)
    monkeypatch.setattr(rows, "_READING_S", 0.0)
    waiting = threading.Event()
    grammars = Grammars()

    def load() -> Vocabulary:
        waiting.wait(30)
        return VOCABULARY

    with pytest.raises(RequestError, match="takes longer than"):
        grammars.check(StructuredOutputsParams(regex="a"), [EOS], load)
    waiting.set()


def test_without_the_package_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "quire.structured_output.guidance", raising=False)
    with pytest.raises(RequestError, match=r"-m pip install 'llguidance"):
        Grammars().check(StructuredOutputsParams(regex="a"), [EOS], lambda: VOCABULARY)
