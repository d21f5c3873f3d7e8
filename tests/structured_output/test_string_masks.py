"""Inside of strings, masks that the engine did not make are the masks that it would have made."""

import random
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.grammar_text import write_grammar
from quire.structured_output.guidance import GuidanceBackend
from quire.structured_output.string_masks import longest_bound
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
BACKEND = GuidanceBackend(VOCABULARY, (EOS,))

texts = st.one_of(
    st.just({"type": "string"}),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 40)),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    st.just({"enum": ["ab", "abcdef", "é"]}),
    st.just({"type": "integer"}),
    st.just({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}, {"type": "object"}]}),
)  # fmt: skip
names = st.sampled_from(["name", "a", "ab", "é", 'q"'])
schemas = st.recursive(
    texts,
    lambda inner: st.one_of(
        st.builds(
            lambda properties, is_open: (
                {"type": "object", "properties": properties, "required": list(properties)}
                | ({} if is_open else {"additionalProperties": False})
            ),
            st.dictionaries(names, inner, min_size=1, max_size=3),
            st.booleans(),
        ),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_masks_are_those_of_the_engine(schema: dict[str, Any], seed: int) -> None:
    params, rng = StructuredOutputsParams(json=schema), random.Random(seed)
    row = BACKEND.begin(BACKEND.compile(params))
    plain = llguidance.LLMatcher(BACKEND._tokenizer, write_grammar(params), log_level=0)
    masks_NW = np.zeros((2, -(-len(TOKENS) // 32)), dtype=np.int32)
    for _ in range(60):
        BACKEND.fill([(row, 0)], masks_NW)
        assert BACKEND.settle([(row, 0)], masks_NW) == {}
        plain.unsafe_compute_mask_ptr(masks_NW[1].ctypes.data, masks_NW[1].nbytes)
        assert (masks_NW[0] == masks_NW[1]).all()
        allowed = np.flatnonzero(np.unpackbits(masks_NW[0].view(np.uint8), bitorder="little")).tolist()
        dear = [token_id for token_id in allowed if token_id > EOS]
        token_id = rng.choice(dear if dear and rng.random() < 0.6 else allowed)
        if token_id == EOS:
            break
        assert BACKEND.advance([(row, token_id)]) == [True]
        assert plain.consume_token(token_id)


@pytest.mark.parametrize("bound", [0, 30])
def test_the_inside_of_a_string_is_recognised(bound: int) -> None:
    string = {"type": "string", "maxLength": bound} if bound else {"type": "string"}
    row = BACKEND.begin(BACKEND.compile(StructuredOutputsParams(json={"type": "array", "items": string})))
    masks_NW = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    known = []
    for byte in b'["abc':
        BACKEND.fill([(row, 0)], masks_NW)
        BACKEND.settle([(row, 0)], masks_NW)
        known.append(row.base is not None)
        assert BACKEND.advance([(row, byte)]) == [True]
    assert known == [False, False, True, True, True]
    if bound:
        assert row.left == bound - 3
    assert BACKEND.advance([(row, ord('"'))]) == [True]
    assert row.base is None


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
    assert longest_bound(schema) == bound
