"""JSON texts inside of requests: what is parsed, and what is refused."""

import json

import pytest

from quire.config.limits import MAX_JSON_DEPTH
from quire.json_text import TooDeepError, parse_json


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_a_text_is_parsed_up_to_the_depth_that_a_body_may_have() -> None:
    assert parse_json(nested(MAX_JSON_DEPTH)) == json.loads(nested(MAX_JSON_DEPTH))
    many = json.dumps([{"a": [1]}] * 500 + ["[" * 500, '{"' * 500])
    assert parse_json(many) == json.loads(many)


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 990, 100_000])
def test_a_deeper_text_is_refused_whatever_the_stack_would_allow(depth: int) -> None:
    with pytest.raises(TooDeepError, match=f"nested more than {MAX_JSON_DEPTH} levels deep"):
        parse_json(nested(depth))
    with pytest.raises(ValueError):
        parse_json("[" * depth)


@pytest.mark.parametrize("text", ["", "{", '{"a": }', "\ud800", '"' + "[" * 100_000])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
