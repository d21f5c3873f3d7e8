"""Prompts and conversations as users of the offline API write them, as lists of prompts and in the shape of chat templates."""

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from quire.errors import RequestError
from quire.inputs import PromptType
from quire.json_text import parse_json
from quire.tokenizers.content_format import ContentFormat


def as_prompts(prompts: Any) -> list[PromptType]:
    """One prompt or several, as several. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | dict):
        return [cast("PromptType", prompts)]
    try:
        listed = list(prompts)
    except TypeError:
        message = f"prompts must be text, token ids, a dict or a list of these, not {type(prompts).__name__}"
        raise RequestError(message, param="prompt") from None
    if listed and hasattr(listed[0], "__index__"):
        return [listed]
    return cast("list[PromptType]", listed)


def check_count(given: Sequence[object], count: int, name: str) -> None:
    """Raise a RequestError unless there are as many parameters as prompts."""
    if len(given) != count:
        what = f"{name} has {len(given)} entries for {count} prompts"
        raise RequestError(f"{what}; give one for all, or one for each", param=name)


def split_conversations(messages: Any) -> tuple[list[list[dict[str, Any]]], bool]:
    """One conversation or several, as several; and whether it was one. Raises RequestError: it is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of messages, or a list of such lists", param="messages")
    is_one = isinstance(messages[0], Mapping)
    conversations = [messages] if is_one else messages
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or not conversation or isinstance(conversation, str):
            raise RequestError("a conversation must be a list with at least one message", param="messages")
        for message in conversation:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError("a message must be an object with a `role`", param="messages")
    return [list(conversation) for conversation in conversations], is_one


def check_content_format(content_format: ContentFormat) -> ContentFormat:
    """The format, if it is one. Raises RequestError: it is none."""
    if content_format not in get_args(ContentFormat):
        message = f"chat_template_content_format is {content_format!r}; it may be auto, string or openai"
        raise RequestError(message, param="chat_template_content_format")
    return content_format


def prepare_conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template: content as text or as parts of text, tool calls with their arguments as objects.
    Raises RequestError: content that is not text."""
    return [_prepare(message) for message in messages]


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    prepared = dict(message)
    content = message.get("content")
    if not isinstance(content, str):
        texts = _texts(content)
        prepared["content"] = "" if texts is None else [{"type": "text", "text": text} for text in texts]
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_with_object_arguments(call) for call in message["tool_calls"]]
    return prepared


def _texts(content: Any) -> list[str] | None:
    """The texts of a content's parts; None where there are none."""
    if content is None:
        return None
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise RequestError("a message's content must be text or a list of parts", param="messages")
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"content parts of type {kind!r} are not supported; only text is", param="messages")
        texts.append(text)
    return texts


def _with_object_arguments(call: Any) -> Any:
    """Clients send a tool call's arguments as JSON text; templates expect the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(cast("Mapping[str, Any]", call["function"]))
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = parse_json(function["arguments"] or "{}")
        except ValueError as error:
            raise RequestError(f"a tool call's arguments are not valid JSON: {error}", param="messages") from None
    return {**call, "function": function}
