"""Chat messages as the protocol writes them → the plain dicts that a chat template reads.

Checks shapes, reads text parts, parses the JSON arguments of past tool calls. Knows nothing of templates or tokens.
"""

import json
from typing import Any

from quire.config import limits
from quire.entrypoints.openai.errors import HTTPError, bad_request

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
        raise bad_request(f"{field}: at least one message is needed.", field)
    if len(messages) > limits.MAX_CHAT_MESSAGES:
        raise bad_request(f"{field}: {len(messages)} messages; at most {limits.MAX_CHAT_MESSAGES}.", field)
    return [_normalize(message, f"{field}[{index}]", keep_parts) for index, message in enumerate(messages)]


def _normalize(message: dict[str, Any], path: str, keep_parts: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise bad_request(f"{path}.role: expected a string, one of {', '.join(ROLES)}.", f"{path}.role")
    if role not in ROLES:
        raise bad_request(f"{path}.role: {role[:60]!r} is unknown; allowed: {', '.join(ROLES)}.", f"{path}.role")
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    plain["content"] = _content(message, role, path, keep_parts)
    if "reasoning" in plain:  # the name that templates know
        plain.setdefault("reasoning_content", plain["reasoning"])
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{path}.tool_calls")
    for key in ("name", "tool_call_id"):
        if key in plain and not isinstance(plain[key], str):
            raise bad_request(f"{path}.{key}: expected a string.", f"{path}.{key}")
    return plain


def _content(message: dict[str, Any], role: str, path: str, keep_parts: bool) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    field = f"{path}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return "" if not message.get("tool_calls") else None
        raise bad_request(f"{field}: this field is required.", field)
    if isinstance(content, list):
        texts = [_text_of(part, f"{field}[{index}]") for index, part in enumerate(content)]
        if keep_parts and len(texts) > 1:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)
    raise bad_request(f"{field}: expected a string or a list of parts.", field)


def _text_of(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_request(f"{path}: expected an object with a type.", path)
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in TEXT_PARTS:
        raise _unsupported_part(kind, path)
    text = part.get("text", part.get(str(kind)))
    if not isinstance(text, str):
        raise bad_request(f"{path}.text: expected a string.", f"{path}.text")
    return text


def _unsupported_part(kind: Any, path: str) -> HTTPError:
    if not isinstance(kind, str):
        return bad_request(f"{path}.type: expected a string.", f"{path}.type")
    message = f"{path}.type: {kind[:60]!r} content is not supported by this model; allowed: 'text'."
    return bad_request(message, f"{path}.type", "not_supported")


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{path}: expected a list.", path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Templates want the arguments as an object; the protocol carries them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{path}.function.name: expected a string.", f"{path}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            field = f"{path}.function.arguments"
            raise bad_request(f"{field}: not valid JSON.", field) from None
    return {**call, "function": {**function, "arguments": arguments if arguments is not None else {}}}
