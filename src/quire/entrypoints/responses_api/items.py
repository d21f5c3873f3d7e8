"""The items of a response's output: messages, reasoning, calls of functions; and ids for items of any kind.

Knows names and types.
"""

import uuid
from typing import Any

import msgspec

from quire.entrypoints.openai.responses import TokenLogprob

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def new_id(kind: str) -> str:
    """An id that nobody can guess: whoever knows it may read what it names."""
    return f"{_PREFIXES.get(kind, kind)}_{uuid.uuid4().hex}"


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text for the user."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """The assistant's words."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The assistant's thoughts."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call that the model asks for; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem
