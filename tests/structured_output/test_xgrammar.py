"""What holds with one engine holds with the other: random walks end in texts of the wanted form."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.config import StructuredOutputsConfig
from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.grammars import Grammars, RowGrammar
from quire.structured_output.vocabulary import Vocabulary

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

EOS, SPECIAL = 256, 257
WORDS = [b'{"', b'": ', b'",', b"true", b"ab", b"12", b"]}", b"\n", "é".encode(), b"\x00\x1f", b"</f>"]
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<eos>", b"<special>"] + WORDS
VOCABULARY = Vocabulary(TOKENS, [SPECIAL], lambda text: list(text.encode()))
GRAMMARS = Grammars(StructuredOutputsConfig(backend="xgrammar"))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def start(grammars: Grammars = GRAMMARS, **fields: Any) -> RowGrammar:
    params = StructuredOutputsParams(**fields)
    grammars.check(params, [EOS], lambda: VOCABULARY)
    return grammars.start(params, [EOS], lambda: VOCABULARY)


def allowed_after(row: RowGrammar, output: list[int]) -> list[int]:
    masks_NW = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    assert GRAMMARS.begin_fill([(row, output)], masks_NW).finish() == {}
    return np.flatnonzero(np.unpackbits(masks_NW.view(np.uint8)[0], count=len(TOKENS), bitorder="little")).tolist()


def walk(row: RowGrammar, seed: int) -> str:
    rng, output = random.Random(seed), []
    while True:
        allowed = allowed_after(row, output)
        assert SPECIAL not in allowed
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            assert allowed_after(row, [*output, EOS]) == [EOS]
            return b"".join(TOKENS[token_id] for token_id in output).decode()
        closing = [token_id for token_id in allowed if TOKENS[token_id] in (b'"', b"}", b"]", b"</f>", b"<")]
        output.append(
            rng.choice(closing if closing and rng.random() < 0.5 else [each for each in allowed if each != EOS])
        )


@pytest.mark.parametrize("seed", range(8))
def test_texts_have_their_form(seed: int) -> None:
    jsonschema.validate(json.loads(walk(start(json=PERSON, disable_any_whitespace=True), seed)), PERSON)
    assert isinstance(json.loads(walk(start(json_object=True), seed), strict=True), dict)
    assert re.fullmatch(r"[a-c]{2,5}-\d{3}", walk(start(regex=r"[a-c]{2,5}-\d{3}"), seed))
    assert walk(start(choice=['é "x"', "a\\b", "ab\n"]), seed) in ('é "x"', "a\\b", "ab\n")
    assert re.fullmatch(r"\([xyz]\)", walk(start(grammar='root ::= "(" inner ")"\ninner ::= [xy] | "z"'), seed))


def test_structural_tags_bind_what_stands_between_them() -> None:
    tag = {"structures": [{"begin": "<f=a>", "schema": {"enum": [1, 22]}, "end": "</f>"}], "triggers": ["<f="]}
    row, said = start(structural_tag=tag), list(b"free <f=")
    assert allowed_after(row, said) == [ord("a")]
    said += list(b"a>22</f>")
    assert EOS in allowed_after(row, said) and len(allowed_after(row, said)) > 150


def test_auto_gives_tags_with_a_format_to_this_engine() -> None:
    tag = {"format": {"type": "const_string", "value": "ab"}}
    grammars = Grammars()
    row = start(grammars, structural_tag=tag)
    masks_NW = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    assert grammars.begin_fill([(row, [])], masks_NW).finish() == {}
    bits = np.unpackbits(masks_NW.view(np.uint8)[0], bitorder="little")
    assert np.flatnonzero(bits).tolist() == [ord("a"), TOKENS.index(b"ab")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "json"),
        ({"json": {"properties": {"a": {"not": {}}}}}, "json"),
        ({"json": {"type": "object"}, "whitespace_pattern": " ?"}, "whitespace_pattern"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"structural_tag": {"structures": [{}], "triggers": []}}, "structural_tag"),
    ],
)
def test_what_it_cannot_keep_to_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        start(**fields)
    assert caught.value.param == param


def test_a_row_that_leaves_its_grammar_is_told() -> None:
    masks_NW = np.zeros((2, -(-len(TOKENS) // 32)), dtype=np.int32)
    good, bad = start(regex="ab"), start(regex="ab")
    assert list(GRAMMARS.begin_fill([(good, list(b"a")), (bad, list(b"x"))], masks_NW).finish()) == [1]
