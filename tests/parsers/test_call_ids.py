"""Ids of tool calls have the form that the model's template wants."""

import pytest
from mistral_common.exceptions import InvalidFunctionCallException
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.protocol.instruct.validator import MistralRequestValidatorV3, ValidationMode

from quire.parsers.call_ids import count_calls, new_call_id
from quire.parsers.formats import PLAIN, TOOLS


def second_turn(call_id: str) -> ChatCompletionRequest:
    call = ToolCall(id=call_id, function=FunctionCall(name="now", arguments="{}"))
    answer = ToolMessage(content="noon", tool_call_id=call_id, name="now")
    return ChatCompletionRequest(
        model="m", messages=[UserMessage(content="When?"), AssistantMessage(tool_calls=[call]), answer]
    )


def test_mistrals_validator_takes_the_ids_of_its_format() -> None:
    validator = MistralRequestValidatorV3(mode=ValidationMode.serving)
    ids = [new_call_id(TOOLS["mistral"], "now", 0) for _ in range(50)]
    assert len(set(ids)) == 50
    for call_id in ids:
        validator.validate_request(second_turn(call_id))
    with pytest.raises(InvalidFunctionCallException):
        validator.validate_request(second_turn(new_call_id(TOOLS["hermes"], "now", 0)))


def test_numbered_ids_count_on_through_the_conversation() -> None:
    messages = [
        {"role": "user", "content": "When and where?"},
        {"role": "assistant", "tool_calls": [{"id": "functions.now:0"}, {"id": "functions.here:1"}]},
        {"role": "assistant", "tool_calls": None},
    ]
    assert count_calls(messages) == 2
    assert new_call_id(TOOLS["kimi_k2"], "now", count_calls(messages)) == "functions.now:2"


def test_other_ids_are_random() -> None:
    for tools in (None, PLAIN, TOOLS["hermes"]):
        first, second = (new_call_id(tools, "now", 0) for _ in range(2))
        assert first != second and first.startswith("call_")
