"""A checkpoint's own response template, read by Transformers, gives reasoning, content and calls."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.parsers.test_formats import TOOL_LIST, cuts, joined

from quire.errors import ConfigError
from quire.parsers.choice import apply_response_template, choose_formats
from quire.parsers.response_template import read_response_template, reasoning_of_template
from quire.parsers.stream import AnswerParser

pytest.importorskip("transformers.utils.chat_parsing")

TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"close": "<|im_end|>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
PROMPT = "<|im_start|>user\nHi <think><|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'


def folder_of(template: Any, folder: Path) -> str:
    (folder / "tokenizer_config.json").write_text(json.dumps({"response_template": template}))
    return str(folder)


def parse(template: dict[str, Any], parts: list[str], prompt: str = PROMPT, has_tools: bool = True) -> Any:
    parser = AnswerParser(response_template=template, prompt=prompt, has_tools=has_tools, offered=TOOL_LIST)
    pieces = [piece for part in parts for piece in parser.push(part)]
    reasoning, content, calls = joined([*pieces, *parser.finish()])
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


def test_regions_become_parts_of_the_answer_wherever_the_text_is_cut(tmp_path: Path) -> None:
    template = read_response_template(folder_of(TEMPLATE, tmp_path), "reasoning_parser")
    answer = f"<think>\nWhy?\n</think>\n\nLook:\n{CALL}\n{CALL}<|im_end|>"
    call = ("get_weather", {"city": "Köln", "days": 3})
    for parts in cuts(answer, every=7):
        assert parse(template, parts) == ("Why?", "Look:", [call, call])


def test_a_prompt_may_have_opened_a_region(tmp_path: Path) -> None:
    template = read_response_template(folder_of(TEMPLATE, tmp_path), "reasoning_parser")
    for parts in cuts("Why?</think>So."):
        assert parse(template, parts, PROMPT + "<think>") == ("Why?", "So.", [])
    assert parse(template, ["Why?"], PROMPT + "<think>") == ("Why?", "", []), "an answer that is cut off"
    assert parse(template, ["So."]) == ("", "So.", [])


def test_what_is_no_call_stays_content(tmp_path: Path) -> None:
    template = read_response_template(folder_of(TEMPLATE, tmp_path), "reasoning_parser")
    for parts in cuts("<think>Why?</think>So. <tool_call>no JSON</tool_call> and more"):
        assert parse(template, parts) == ("Why?", "So.no JSON and more", [])
    assert parse(template, [CALL], has_tools=False)[1:] == (CALL.split(">", 1)[1].rsplit("<", 1)[0].strip(), [])


def test_its_markers_serve_for_budgets(tmp_path: Path) -> None:
    formats = apply_response_template(choose_formats("hf", "auto", None), folder_of(TEMPLATE, tmp_path))
    assert formats.response_template is not None and formats.reasoning_name == formats.tools_name == "hf"
    assert formats.reasoning is not None and (formats.reasoning.start, formats.reasoning.end) == (
        ("<think>",),
        ("</think>",),
    )
    del TEMPLATE["fields"]["thinking"]["open"]
    TEMPLATE["fields"]["thinking"]["open_pattern"] = "<think ?>"
    assert reasoning_of_template(TEMPLATE) is None


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has none"),
        ({"fields": {"citations": {"open": "<c>"}}}, "'citations'; allowed: thinking, content, tool_calls"),
        ({"fields": {}}, "is wrong"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused(template: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read_response_template(folder_of(template, tmp_path), "reasoning_parser")


CHANNELS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|think|>", "close": "<|end|><|start|>assistant", "content": "text"},
        "content": {"open": "<|final|>", "close": ["<|return|>"], "content": "text"},
    },
}


def test_white_space_that_continues_a_text_of_the_prompt_is_kept(tmp_path: Path) -> None:
    template = read_response_template(folder_of(TEMPLATE, tmp_path), "reasoning_parser")
    assert parse(template, [" more.</think>", " Done."], prompt=PROMPT + "<think>Some") == (" more.", "Done.", [])


def test_a_marker_of_the_prompt_that_the_answer_does_not_complete_is_no_part_of_the_answer(tmp_path: Path) -> None:
    template = read_response_template(folder_of(TEMPLATE, tmp_path), "reasoning_parser")
    assert parse(template, ["king"], prompt=PROMPT + "<thi") == ("", "king", [])
    assert parse(template, [], prompt=PROMPT + "<thi") == ("", "", [])
    assert parse(template, ["nk>Why?</think>x"], prompt=PROMPT + "<thi") == ("Why?", "x", [])


@pytest.mark.parametrize("end", ["<|end|>", "<|end|><|start|>"])
def test_an_end_marker_that_is_cut_off_between_two_special_tokens_ends_its_region(tmp_path: Path, end: str) -> None:
    template = read_response_template(folder_of(CHANNELS, tmp_path), "reasoning_parser")
    for parts in (["<|think|>plan" + end], ["<|think|>plan", end[:4], end[4:]]):
        assert parse(template, parts, prompt="<|start|>assistant") == ("plan", "", [])
