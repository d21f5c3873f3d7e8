"""`tools/vllm_cases.py`: cases of an unpacked distribution run against Quire's parsers, and are told apart."""

import json
from pathlib import Path

import pytest
from tools.vllm_cases import causes, run_cases, table
from tools.vllm_faces.servers import flags_of

REGISTRY = '{name} = {{"hermes": ("hermes_parser", "HermesParser"), "strange": ("strange_parser", "StrangeParser")}}\n'
CASES = """
import pytest
from transformers import AutoTokenizer

from vllm.anywhere.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_parser import MARKER, HermesParser
from vllm.tool_parsers.inner import Machine

TEXT = MARKER + '{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained("some/model")

def test_a_call(tokenizer):
    found = HermesParser(tokenizer).extract_tool_calls(TEXT, ChatCompletionRequest(messages=[], tools=TOOLS))
    assert found.tools_called and found.tool_calls[0].function.arguments == '{"a": 1}' and found.content is None

def test_a_stream(tokenizer):
    parser, before, name = HermesParser(tokenizer), "", ""
    for token in tokenizer.encode(TEXT, add_special_tokens=False):
        text = tokenizer.decode([token])
        delta = parser.extract_tool_calls_streaming(before, before + text, text, [], [], [token], None)
        before += text
        name += "".join(call.function.name or "" for call in delta.tool_calls) if delta else ""
    assert before == TEXT and name == "f"

def test_that_fails(tokenizer):
    assert HermesParser(tokenizer).extract_tool_calls(TEXT, None).content == "text"

def test_of_another_parser(tokenizer):
    ToolParserManager.get_tool_parser("strange")(tokenizer).extract_tool_calls(TEXT, None)

def test_of_the_inside(tokenizer):
    assert HermesParser(tokenizer).state == 1

def test_of_a_class_within():
    assert Machine().run()
"""


@pytest.fixture
def distribution(tmp_path: Path) -> Path:
    files = {
        "vllm/tool_parsers/__init__.py": REGISTRY.format(name="_TOOL_PARSERS_TO_REGISTER"),
        "vllm/tool_parsers/hermes_parser.py": 'OPEN = "<"\nMARKER = OPEN + "tool_call" + ">"\n',
        "vllm/reasoning/__init__.py": "_REASONING_PARSERS_TO_REGISTER = {}\n",
        "tests/__init__.py": "",
        "tests/tool_parsers/__init__.py": "",
        "tests/tool_parsers/test_hermes.py": CASES,
        "tests/tool_parsers/test_broken.py": "import a_package_that_is_not_there\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_case_has_its_outcome(distribution: Path) -> None:
    outcomes = run_cases(distribution, "", jobs=1)
    found = {each["case"].rpartition("::")[2]: each["outcome"] for each in outcomes}
    assert found == {
        "test_a_call": "equal",
        "test_a_stream": "equal",
        "test_that_fails": "different",
        "test_of_another_parser": "absent",
        "test_of_the_inside": "not black box",
        "test_of_a_class_within": "not black box",
        "tests/tool_parsers/test_broken.py": "file not imported",
    }
    assert "assert" in next(each["why"] for each in outcomes if each["outcome"] == "different")
    json.dumps(outcomes)
    assert table(outcomes).splitlines()[-1] == "2 of 3 black-box cases equal (66.7%)"


def test_cases_that_are_different_are_told_by_their_cause() -> None:
    outcomes = [
        {"case": "tests/a/test_x.py::test_show_version", "outcome": "different"},
        {"case": "tests/a/test_x.py::test_show_version", "outcome": "equal"},
        {"case": "tests/a/test_y.py::test_f[watermarked-True]", "outcome": "different"},
        {"case": "tests/a/test_y.py::test_something_new", "outcome": "different"},
    ]
    found = causes(outcomes)
    assert (
        found == {"the version is Quire's": 1, "absent: watermarks": 1, "not judged": 1}
        and list(found)[-1] == "not judged"
    )


def test_flags_of_a_case_fit_the_model_that_stands_in() -> None:
    given = ["--dtype", "bfloat16", "--max-model-len", "8192", "--enforce-eager", "--uds=/tmp/s", "--strict"]
    assert flags_of(given, "some/model") == ["--uds=/tmp/s", "--strict"]
    adapters = ["--enable-lora", "--lora-modules", "one=/x", "two=/y", "--max-lora-rank", "8"]
    assert flags_of(adapters, "some/model") == ["--served-model-name", "some/model", "one", "two"]
    assert flags_of(["--max-model-len", "100"], "BAAI/bge-m3") == ["--max-model-len", "100"]


def test_a_path_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unpacked source distribution"):
        run_cases(tmp_path, "", jobs=1)
