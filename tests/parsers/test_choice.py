"""The format of calls is found in a chat template that writes them."""

import json

import pytest
from tests.parsers.writing import SPECIAL_IDS, write

from quire.parsers.choice import choose_formats
from quire.parsers.formats import TOOLS
from quire.parsers.stream import parse_answer

CALLS = [("f", {"a": "x", "b": 3})]
TOOL = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
WITHOUT_MARKS = ("xlam", "llama3_json", "llama4_json", "pythonic", "llama4_pythonic", "granite-20b-fc")
"""Their templates have nothing that belongs to them alone."""


@pytest.mark.parametrize("name", [name for name in TOOLS if name not in WITHOUT_MARKS])
def test_calls_as_a_template_writes_them_are_read(name: str) -> None:
    written = write(name, CALLS, SPECIAL_IDS)
    found = choose_formats("none", "auto", f"{{{{ '<|im_start|>' }}}} {written}").tools
    answer = parse_answer(written, tools=found, offered=[TOOL])
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == CALLS and not answer.content


def test_a_checkpoints_suffix_is_taken_from_its_template() -> None:
    written = write("hy_v4", CALLS).replace(">", ":6124c78e>")
    found = choose_formats("none", "hy_v4", written).tools
    answer = parse_answer(written, tools=found, offered=[TOOL])
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == CALLS and not answer.content
