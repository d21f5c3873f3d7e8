"""The ids of tool calls. Most templates take any; some want ids of a certain kind."""

import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from quire.guards import is_sequence
from quire.parsers.formats import ToolFormat

_SHORT, _CHARACTERS = 9, string.ascii_letters + string.digits


def new_call_id(tools: ToolFormat | None, name: str, number: int, written: str = "") -> str:
    """An id for a call of a function.

    Args:
        tools: the format of calls.
        number: how many calls there are before it in the conversation.
        written: the id that the model wrote, if any.
    """
    if written:
        return written
    match "any" if tools is None else tools.ids:
        case "numbered":
            return f"functions.{name}:{number}"
        case "short":
            return "".join(secrets.choice(_CHARACTERS) for _ in range(_SHORT))
        case _:
            return f"call_{uuid.uuid4().hex[:24]}"


def count_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """The calls in a conversation."""
    return sum(len(calls) for message in messages if is_sequence(calls := message.get("tool_calls")))
