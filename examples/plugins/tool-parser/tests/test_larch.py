"""Answers in the format are read as calls, whole or piece by piece."""

import pytest

from quire.parsers.choice import choose_formats
from quire.parsers.stream import AnswerParser, parse_answer
from quire.plugins import load_general_plugins

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
TEXT = 'Wait. <larch>{"name": "f", "arguments": {"a": 1}}</larch>'


@pytest.fixture(autouse=True)
def loaded() -> None:
    load_general_plugins("frontend")


def test_a_call_is_found() -> None:
    answer = parse_answer(TEXT, tools=choose_formats("none", "larch", None).tools, offered=[TOOL])
    assert answer.content.strip() == "Wait."
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}')]


def test_a_stream_gives_the_same() -> None:
    parser = AnswerParser(tools=choose_formats("none", "larch", None).tools, offered=[TOOL])
    pieces = [piece for letter in TEXT for piece in parser.push(letter)]
    assert [*pieces, *parser.finish()]
