"""Templates in the styles of many families print what Transformers prints, or are refused where it refuses."""

import itertools
from typing import Any

import pytest
from tests.tokenizers.templates import TEMPLATES

from quire.errors import RequestError
from quire.tokenizers.interface import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says how the wéather is <now>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                    "days": {"type": "array", "items": {"type": ["integer", "null"]}, "maxItems": 3},
                },
                "required": ["city"],
            },
        },
    }
]
DOCUMENTS = [{"title": "A", "text": "The first.\n\nMore."}, {"title": "B", "text": "Zweites"}]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": [1, None], "fine": True}},
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hi there! "}],
    [{"role": "system", "content": "Be kind.\n"}, {"role": "user", "content": "Wie geht's?"}],
    [
        {"role": "user", "content": "One\n\nTwo"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n Yes. "},
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": "It  is so ", "reasoning_content": "why not"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "call_1"},
        {"role": "tool", "content": "warm", "tool_call_id": "call_1"},
    ],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So", "reasoning": "old name"}],
]
OPTIONS: list[dict[str, Any]] = [
    {"tools": tools, "documents": documents, **more}
    for tools, documents, more in itertools.product(
        (None, TOOLS),
        (None, DOCUMENTS),
        ({}, {"add_generation_prompt": True, "enable_thinking": False}, {"continue_final_message": True}),
    )
]


@pytest.fixture(scope="module")
def theirs(tokenizer_folders: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(tokenizer_folders["sentencepiece"]))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_prompts_equal_those_of_transformers(
    tokenizers_by_family: dict[str, Tokenizer], theirs: Any, name: str, conversation: list[dict[str, Any]]
) -> None:
    ours = tokenizers_by_family["sentencepiece"]
    num_printed = 0
    for options in OPTIONS:
        if name == "filters" and "continue_final_message" in options:
            continue  # it prints a message more than once, with whatever marks its end
        common = {"chat_template": TEMPLATES[name], "tokenize": False, **options}
        try:
            expected = theirs.apply_chat_template(conversation, **common)
        except Exception:
            with pytest.raises(RequestError):
                ours.apply_chat_template(conversation, **common)
            continue
        num_printed += 1
        assert ours.apply_chat_template(conversation, **common) == expected
    if name != "turns in brackets":
        assert num_printed >= 4
