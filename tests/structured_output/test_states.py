"""Masks that the engine did not make are the masks that it would have made."""

import concurrent.futures
import random
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import StructuredOutputsConfig
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.grammars import Grammars
from quire.structured_output.guidance import GuidanceBackend, write_grammar
from quire.structured_output.json_states import read_rules
from quire.structured_output.rows import RowGrammar
from quire.structured_output.states import States
from quire.structured_output.string_masks import has_token
from quire.structured_output.vocabulary import Vocabulary

EOS = 256
WORDS = [
    b'{"',
    b'":',
    b'",',
    b'"}',
    b"true",
    b"ab",
    b"abcdef",
    b'ab"',
    b'a",',
    b"\\n",
    b"a\\",
    b"\\u00",
    b"x\\tyz",
    b"\n\n",
]
WORDS += [
    "é".encode(),
    "aé€".encode(),
    b"a\xe2\x82",
    b"\xac",
    b"name",
    b'name"',
    b"\x7f",
    b"a\x7f",
    b"1234567",
    b'"]',
    b'"b"',
]
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<eos>"] + WORDS
VOCABULARY = Vocabulary(TOKENS, [EOS], lambda text: list(text.encode()))
GRAMMARS = Grammars(StructuredOutputsConfig(backend="guidance"))

texts = st.one_of(
    st.just({"type": "string"}),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 40)),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    st.just({"enum": ["ab", "abcdef", "é"]}),
    st.sampled_from([{"type": "integer", "minimum": 7, "maximum": 120}, {"type": "number"}, {"type": "boolean"}]),
    st.sampled_from([{"enum": [1, 12, "ab", None]}, {"const": "name"}, {"type": "string", "format": "date"}]),
    st.just({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}, {"type": "object"}]}),
)
names = st.sampled_from(["name", "a", "ab", "é", 'q"'])
schemas = st.recursive(
    texts,
    lambda inner: st.one_of(
        st.builds(
            lambda properties, wanted, others: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in wanted],
                "additionalProperties": others,
            },
            st.dictionaries(names, inner, max_size=3),
            st.sets(names),
            st.one_of(st.booleans(), inner),
        ),
        st.builds(
            lambda items, first, least, more: {
                "type": "array",
                "items": items,
                "prefixItems": first,
                "minItems": least,
                "maxItems": least + more,
            },
            inner,
            st.lists(inner, max_size=2),
            st.sampled_from([0, 1, 40]),
            st.integers(1, 3),
        ),
    ),
    max_leaves=5,
)


def form_states(params: StructuredOutputsParams) -> States:
    future: concurrent.futures.Future[States] = GRAMMARS.compile(params, [EOS], lambda: VOCABULARY)
    return future.result()


def walk(params: StructuredOutputsParams, seeds: list[int], steps: int = 60) -> float:
    """Rows that follow one form at random, whose masks are compared with the engine's; the part of them that were known."""
    states, known, count = form_states(params), 0, 0
    assert isinstance(states.backend, GuidanceBackend)
    for seed in seeds:
        rng = random.Random(seed)
        row: RowGrammar = GRAMMARS.start(params, [EOS], lambda: VOCABULARY)
        plain = llguidance.LLMatcher(states.backend._tokenizer, write_grammar(params), log_level=0)
        masks_NW = np.zeros((2, -(-len(TOKENS) // 32)), dtype=np.int32)
        output: list[int] = []
        for _ in range(steps):
            filling = GRAMMARS.begin_fill([(row, output)], masks_NW)
            known, count = known + (not filling._unknown), count + 1
            assert filling.finish() == {}
            plain.unsafe_compute_mask_ptr(masks_NW[1].ctypes.data, masks_NW[1].nbytes)
            text = b"".join(TOKENS[token_id] for token_id in output)
            assert (masks_NW[0] == masks_NW[1]).all(), (params.constraint(), text, differences(masks_NW))
            allowed = np.flatnonzero(np.unpackbits(masks_NW[0].view(np.uint8), bitorder="little")).tolist()
            dear = [token_id for token_id in allowed if token_id > EOS]
            closing = [token_id for token_id in allowed if TOKENS[token_id][:1] in (b'"', b"]", b"}", b",", b":")]
            chance = rng.random()
            token_id = rng.choice(dear if dear and chance < 0.4 else closing if closing and chance < 0.7 else allowed)
            if token_id == EOS:
                break
            output.append(token_id)
            assert plain.consume_token(token_id)
    return known / count


def differences(masks_NW: np.ndarray) -> list[bytes]:
    bits = np.unpackbits((masks_NW[0] ^ masks_NW[1]).view(np.uint8), bitorder="little")
    return [TOKENS[token_id] for token_id in np.flatnonzero(bits)]


@settings(max_examples=80, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32), is_tight=st.booleans())
def test_masks_are_those_of_the_engine(schema: dict[str, Any], seed: int, is_tight: bool) -> None:
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=is_tight)
    walk(params, [seed, seed + 1, seed + 2, seed])


@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"(ab|name){2,5}[0-9]{3}\.x?"},
        {"choice": ["name of it", "name", "ab"]},
        {"grammar": 'start: "ab" %json {"type": "array", "items": {"type": "string", "maxLength": 4}} "name"'},
        {"json": {"type": "string", "pattern": "^a+b$"}},
        {"json": {"type": "array", "items": {"anyOf": [{"const": "ab"}, {"type": "string"}]}}},
        {"json_object": True},
    ],
)
def test_masks_of_any_form_are_those_of_the_engine(form: dict[str, Any]) -> None:
    walk(StructuredOutputsParams(**form), list(range(20)))


def test_what_is_learnt_near_a_string_s_end_is_not_all_there_is() -> None:
    string = {"type": "string", "minLength": 3, "maxLength": 5}
    params = StructuredOutputsParams(json={"type": "array", "items": string, "maxItems": 1})
    masks_NW = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    for text in (b'["abab', b'["aba'):
        row = GRAMMARS.start(params, [EOS], lambda: VOCABULARY)
        for end in range(len(text) + 1):
            assert GRAMMARS.begin_fill([(row, list(text[:end]))], masks_NW).finish() == {}
    assert has_token(masks_NW[0], TOKENS.index(b'ab"'))
    walk(params, list(range(30)))


def test_masks_that_were_made_once_serve_all_rows() -> None:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "ab": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "ab"],
        "additionalProperties": False,
    }
    params = StructuredOutputsParams(json=person)
    walk(params, list(range(200)))
    assert walk(params, list(range(200, 220))) > 0.95


@pytest.mark.parametrize("bound", [0, 30, 3000])
def test_the_inside_of_a_string_is_recognised(bound: int) -> None:
    string = {"type": "string", "maxLength": bound} if bound else {"type": "string"}
    params = StructuredOutputsParams(json={"type": "array", "items": string})
    masks_NW = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    row, output, unknown = GRAMMARS.start(params, [EOS], lambda: VOCABULARY), [], 0
    text = b'["' + b"a" * (bound or 100)
    for byte in (*text, ord('"')):
        filling = GRAMMARS.begin_fill([(row, output)], masks_NW)
        unknown += bool(filling._unknown)
        assert filling.finish() == {}
        assert has_token(masks_NW[0], byte)
        output.append(byte)
    assert unknown <= 6
    assert has_token(masks_NW[0], ord("a")) is not bool(bound)
    walk(params, [1, 2, 3])


def test_what_no_mask_allowed_is_refused() -> None:
    params = StructuredOutputsParams(json={"type": "array", "items": {"type": "string", "maxLength": 7}})
    masks_NW = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    for text, is_fine in ((b'["abcdefg"]', True), (b'["abcdefgh', False), (b"[1", False), (b'["a\\x', False)):
        for parts in (1, len(text)):  # at once, and one by one
            row = GRAMMARS.start(params, [EOS], lambda: VOCABULARY)
            errors = [
                GRAMMARS.begin_fill([(row, list(text[: len(text) * (part + 1) // parts]))], masks_NW).finish()
                for part in range(parts)
            ]
            assert (errors[-1] == {}) is is_fine, (text, parts, errors)
    row = GRAMMARS.start(params, [EOS], lambda: VOCABULARY)
    output = list(b'["ab')
    GRAMMARS.begin_fill([(row, output)], masks_NW).finish()
    output.append(TOKENS.index(b"abcdef"))  # one character too many
    assert "left its grammar" in GRAMMARS.begin_fill([(row, output)], masks_NW).finish()[0]


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        (True, 0),
        ({"type": "array", "items": {"type": "string", "maxLength": 7}}, 7),
        ({"type": "object", "properties": {"a": {"maxLength": 3}, "b": {"type": "string"}}}, 3),
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": {"type": "string", "maxLength": 9}}}, 9),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"enum": ["abcdef"]}]}, None),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string"}]}, None),
        ({"type": "string", "pattern": "^.*x$"}, None),
        ({"type": "string", "format": "date"}, 0),
        ({"type": "string", "format": "uri"}, None),
        ({"patternProperties": {"^a": {}}}, None),
    ],
)
def test_only_plain_strings_are_bounded_by_their_length_alone(schema: Any, bound: int | None) -> None:
    assert (None if (rules := read_rules(schema)) is None else rules.longest) == bound
