"""Formats from outside: by an entry point, by the operator's file, and by classes as vLLM's plugins have."""

from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.oracles.installed_plugins import pretend_installed, restore
from tests.parsers.writing import accepts

from quire import plugins
from quire.errors import ConfigError
from quire.parsers.bodies import JsonObject
from quire.parsers.call_grammar import calls_only, text_and_calls
from quire.parsers.choice import choose_formats
from quire.parsers.formats import PLAIN, REASONING, TOOLS, Reasoning, ToolFormat
from quire.parsers.offered import offered_functions
from quire.parsers.pieces import Answer
from quire.parsers.plugin import ToolParserManager, load_parser_file, register_reasoning_format, register_tool_format
from quire.parsers.schemas import Inexpressible
from quire.parsers.stream import AnswerParser, parse_answer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}

DECLARED = """
from quire.parsers.bodies import JsonObject
from quire.parsers.formats import Reasoning, ToolFormat
from quire.parsers.plugin import register_reasoning_format, register_tool_format

register_tool_format("mine", ToolFormat(JsonObject(), begin=("<call>",), end=("</call>",)))
register_reasoning_format("mine", Reasoning(("<hm>",), ("</hm>",)))
"""
IN_VLLMS_MANNER = """
import json
import re
from quire.parsers.plugin import (
    ExtractedToolCallInformation, FunctionCall, ReasoningParser, ReasoningParserManager, ToolCall, ToolParser,
    ToolParserManager,
)


@ToolParserManager.register_module(["arrow", "arrows"])
class ArrowParser(ToolParser):
    special_tokens = ("=>",)

    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)
        self.arrow = self.vocab["=>"]

    def extract_tool_calls(self, model_output, request):
        known = {tool.function.name for tool in request.tools}
        found = re.findall(r"=> (\\w+)(\\{.*\\})", model_output)
        if "explode" in model_output:
            raise KeyError("explode")
        calls = [ToolCall(function=FunctionCall(name, json.dumps(json.loads(it)))) for name, it in found if name in known]
        return ExtractedToolCallInformation(bool(calls), calls, model_output.partition("=>")[0] or None)


@ReasoningParserManager.register_module("stars")
class Stars(ReasoningParser):
    implied = True

    @property
    def start_token(self):
        return "**think**"

    @property
    def end_token(self):
        return "**say**"
"""


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    restore(monkeypatch, TOOLS, REASONING)


def written(folder: Path, text: str) -> str:
    path = folder / "plugin file.py"
    path.write_text(text)
    return str(path)


def pieces_of(text: str, size: int, **options: Any) -> Answer:
    parser, answer = AnswerParser(**options), Answer()
    for at in range(0, len(text), size):
        for piece in parser.push(text[at : at + size]):
            answer.add(piece)
    for piece in parser.finish():
        answer.add(piece)
    return answer


def test_a_file_registers_formats_that_are_read_and_enforced(tmp_path: Path) -> None:
    load_parser_file(written(tmp_path, DECLARED), "tool_parser_plugin")
    chosen = choose_formats("mine", "mine", None)
    text = '<hm>well</hm>Yes. <call>{"name": "f", "arguments": {"a": 1}}</call>'
    answer = parse_answer(text, reasoning=chosen.reasoning, tools=chosen.tools, offered=[TOOL])
    assert (answer.reasoning, answer.content, answer.calls[0].arguments) == ("well", "Yes.", '{"a": 1}')
    grammar = text_and_calls(TOOLS["mine"], offered_functions([TOOL]), {}, only_one=False)
    assert accepts(grammar, text) and not accepts(grammar, text.replace("1", '"x"'))


def test_an_entry_point_registers_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        register_tool_format("mine", ToolFormat(JsonObject(), begin=("<call>",)))
        register_reasoning_format("mine", Reasoning(("<hm>",), ("</hm>",)))

    monkeypatch.setattr(EntryPoint, "load", lambda self: register)
    pretend_installed(monkeypatch, plugins.GENERAL_GROUP, {"mine": "somewhere:register"})
    assert plugins.load_general_plugins("frontend") == ("mine",)
    chosen = choose_formats("mine", "mine", None)
    assert (chosen.tools, chosen.reasoning) == (TOOLS["mine"], REASONING["mine"])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_class_in_vllms_manner_finds_calls_in_the_whole_answer(tmp_path: Path, size: int) -> None:
    load_parser_file(written(tmp_path, IN_VLLMS_MANNER), "tool_parser_plugin")
    chosen = choose_formats("stars", "arrows", None)
    assert TOOLS["arrow"] == TOOLS["arrows"] and "=>" in chosen.markers
    options: dict[str, Any] = {"reasoning": chosen.reasoning, "tools": chosen.tools, "offered": [TOOL]}
    options["tokenizer"] = SimpleNamespace(get_vocab=lambda: {"=>": 7})
    answer = pieces_of('Hm.**say**Now: => f{"a": 1}\n=> f{"a": 2}', size, **options)
    assert (answer.reasoning, answer.content) == ("Hm.", "Now:")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}'), ("f", '{"a": 2}')]
    for text in ("Just text, => g{}", "They explode. "):
        assert pieces_of(f"Hm.**say**{text}", size, **options).content == text


def test_a_class_may_be_registered_by_its_module_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arrows_elsewhere.py").write_text(IN_VLLMS_MANNER)
    monkeypatch.syspath_prepend(tmp_path)
    ToolParserManager.register_lazy_module(name="lazy", module_path="arrows_elsewhere", class_name="ArrowParser")
    assert TOOLS["lazy"] == TOOLS["arrow"]


def test_calls_that_must_be_made_in_a_class_format_are_a_json_list(tmp_path: Path) -> None:
    load_parser_file(written(tmp_path, IN_VLLMS_MANNER), "tool_parser_plugin")
    for derive in (calls_only, text_and_calls):
        with pytest.raises(Inexpressible):
            derive(TOOLS["arrow"], offered_functions([TOOL]), {}, False)
    assert PLAIN.body != TOOLS["arrow"].body


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import vllm", "import vLLM's names from quire.parsers.plugin"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("from quire.parsers.plugin import *\nregister_tool_format('auto', ToolParser)", "'auto'"),
        ("from quire.parsers.plugin import *\nregister_tool_format('x', ToolParser)", "extract_tool_calls"),
        ("from quire.parsers.plugin import *\nregister_reasoning_format('x', ReasoningParser)", "start_token"),
    ],
)
def test_a_file_that_fails_is_named_with_what_to_do(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_parser_file(written(tmp_path, text), "tool_parser_plugin")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reasoning_parser_plugin: there is no file '/nowhere\.py'"):
        load_parser_file("/nowhere.py", "reasoning_parser_plugin")
    other = tmp_path / "parser.txt"
    other.write_text("")
    with pytest.raises(ConfigError, match="not a Python file"):
        load_parser_file(str(other), "tool_parser_plugin")
    load_parser_file(None, "tool_parser_plugin")
