"""Chat messages as the protocol writes them → the plain dicts that a chat template reads.

Checks shapes, reads text parts, parses the JSON arguments of past tool calls. Knows nothing of templates or tokens.
"""

import json
from typing import Any

from quire.config import limits
from quire.entrypoints.openai.errors import HTTPError, bad_field

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


def normalize_messages(
    messages: list[dict[str, Any]], field: str = "messages", keep_parts: bool = False
) -> list[dict[str, Any]]:
    """Messages ready for a template.

    Args:
        keep_parts: several parts of a content stay a list; otherwise they become lines of one text.

    Raises:
        HTTPError: 400; `param` is the path of what is wrong.
    """
    if not messages:
        raise bad_field(field, "at least one message is needed.")
    if len(messages) > limits.MAX_CHAT_MESSAGES:
        raise bad_field(field, f"{len(messages)} messages; at most {limits.MAX_CHAT_MESSAGES}.")
    return [_normalize(message, f"{field}[{index}]", keep_parts) for index, message in enumerate(messages)]


def _normalize(message: dict[str, Any], path: str, keep_parts: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise bad_field(f"{path}.role", f"expected a string, one of {', '.join(ROLES)}.")
    if role not in ROLES:
        raise bad_field(f"{path}.role", f"{role[:60]!r} is unknown; allowed: {', '.join(ROLES)}.")
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    plain["content"] = _content(message, role, path, keep_parts)
    if "reasoning" in plain:  # the name that templates know
        plain.setdefault("reasoning_content", plain["reasoning"])
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{path}.tool_calls")
    for key in ("name", "tool_call_id"):
        if key in plain and not isinstance(plain[key], str):
            raise bad_field(f"{path}.{key}", "expected a string.")
    return plain


def _content(message: dict[str, Any], role: str, path: str, keep_parts: bool) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    field = f"{path}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return "" if not message.get("tool_calls") else None
        raise bad_field(field, "this field is required.")
    if isinstance(content, list):
        texts = [_text_of(part, f"{field}[{index}]") for index, part in enumerate(content)]
        if keep_parts and len(texts) > 1:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)
    raise bad_field(field, "expected a string or a list of parts.")


def _text_of(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_field(path, "expected an object with a type.")
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in TEXT_PARTS:
        raise _unsupported_part(kind, path)
    text = part.get("text", part.get(str(kind)))
    if not isinstance(text, str):
        raise bad_field(f"{path}.text", "expected a string.")
    return text


def _unsupported_part(kind: Any, path: str) -> HTTPError:
    if not isinstance(kind, str):
        return bad_field(f"{path}.type", "expected a string.")
    message = f"{kind[:60]!r} content is not supported by this model; allowed: 'text'."
    return bad_field(f"{path}.type", message, "not_supported")


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_field(path, "expected a list.")
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Templates want the arguments as an object; the protocol carries them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field(f"{path}.function.name", "expected a string.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            field = f"{path}.function.arguments"
            raise bad_field(field, "not valid JSON.") from None
    return {**call, "function": {**function, "arguments": arguments if arguments is not None else {}}}
