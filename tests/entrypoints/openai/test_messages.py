"""Messages of a request as a chat template gets them."""

from typing import Any

import pytest

from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.openai.prompts import normalize_messages, template_variables
from quire.entrypoints.openai.protocol import ChatCompletionRequest


def one(message: dict[str, Any], keep_parts: bool = True) -> dict[str, Any]:
    return normalize_messages([message], keep_parts=keep_parts)[0]


@pytest.mark.parametrize(
    "role", ["developer", "ipython", "critic", "observation", "tool", "function", "available_tools"]
)
def test_any_role_goes_to_the_template(role: str) -> None:
    message = {"role": role, "content": "x", "name": "n", "tools": [{"a": 1}]}
    assert one(message) == message


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": ', {}),
        ('{"a": "' + "x" * 100_000, {}),
        ("[1]", {}),
        ("42", {}),
        ("true", {}),
        ("null", {}),
        ("", {}),
        (None, {}),
        (7, {}),
    ],
)
def test_arguments_of_past_calls_are_objects(arguments: Any, wanted: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    found = one({"role": "assistant", "content": None, "tool_calls": [call, call]})
    assert [each["function"]["arguments"] for each in found["tool_calls"]] == [wanted, wanted]
    assert found["tool_calls"][0]["id"] == "1" and found["content"] is None


def test_an_empty_list_of_calls_is_left_out() -> None:
    assert one({"role": "assistant", "content": "x", "tool_calls": []}) == {"role": "assistant", "content": "x"}
    assert one({"role": "assistant", "tool_calls": []}) == {"role": "assistant", "content": ""}


def test_reasoning_goes_by_both_of_its_names() -> None:
    found = one({"role": "assistant", "content": "x", "reasoning": "why"})
    assert (found["reasoning"], found["reasoning_content"]) == ("why", "why")
    assert one({"role": "assistant", "content": "x"}) == {"role": "assistant", "content": "x"}


def test_content_may_be_missing_but_a_user_s() -> None:
    for role in ("tool", "assistant", "system", "critic"):
        assert one({"role": role, "content": None})["content"] == ""
        assert one({"role": role})["content"] == ""


def test_parts_of_text_without_text_are_passed_over() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": None}, "b", {"type": "output_text", "text": "c"}]
    assert one({"role": "user", "content": parts}, keep_parts=False)["content"] == "a\nb\nc"
    assert [part["text"] for part in one({"role": "user", "content": parts})["content"]] == ["a", "b", "c"]
    assert one({"role": "tool", "content": [{"type": "text", "text": None}]})["content"] == ""


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {"a": 1}),
        ({"reasoning_effort": "low"}, {"a": 1, "reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"a": 1, "reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "minimal"}, {"a": 1, "reasoning_effort": "low", "enable_thinking": True}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "a": 2}},
            {"a": 2, "reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
)
def test_an_effort_turns_thinking_on_or_off_for_the_template(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    request = ChatCompletionRequest(messages=[], **fields)
    settings = ServerSettings(default_chat_template_kwargs={"a": 1}, reasoning_effort_map={"minimal": "low"})
    assert template_variables(request, settings) == wanted
