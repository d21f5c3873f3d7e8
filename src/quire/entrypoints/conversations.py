"""Prompts and conversations as users write them, as lists of prompts and as the plain dicts that chat templates read.

`LLM.chat` and the server's routes read messages here. Knows no template and no tokenizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from quire.adapters import LoRARequest, check_adapter
from quire.engine.input_processor import InputProcessor, TokenizedPrompt
from quire.entrypoints.media_parts import MediaMessages, MediaPart, PlacedPart
from quire.errors import NotSupportedError, RequestError, instead_of
from quire.inputs import PromptType
from quire.json_text import TooDeepError, parse_json
from quire.logger import init_logger
from quire.tokenizers.content_format import ContentFormat

logger = init_logger(__name__)

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


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


Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one (or none) for each."""


def check_count(given: Sequence[object], count: int, name: str) -> None:
    """Raise a RequestError unless there are as many parameters as prompts."""
    if len(given) != count:
        what = f"{name} has {len(given)} entries for {count} prompts"
        raise RequestError(f"{what}; give one for all, or one for each", param=name)


def adapters_per_prompt(given: Adapters, count: int) -> Sequence[LoRARequest | None]:
    """One for each prompt, or none. Raises RequestError: there are more or fewer, or it is no adapter."""
    if not isinstance(given, Sequence):
        if given is None:
            return [None] * count
        return [check_adapter(given), *[given.as_loaded] * (count - 1)][:count]
    check_count(given, count, "lora_request")
    return given


def split_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several, as several. Raises RequestError: it is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of messages, or a list of such lists", param="messages")
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or not conversation or isinstance(conversation, str):
            raise RequestError("a conversation must be a list with at least one message", param="messages")
        for message in conversation:
            if not isinstance(message, Mapping):
                raise RequestError("a message must be an object with a `role`", param="messages")
    return [list(conversation) for conversation in conversations]


def check_content_format(content_format: ContentFormat) -> ContentFormat:
    """The format, if it is one. Raises RequestError: it is none."""
    if content_format not in get_args(ContentFormat):
        message = f"chat_template_content_format is {content_format!r}; it may be auto, string or openai"
        raise RequestError(message, param="chat_template_content_format")
    return content_format


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], field: str = "messages", *, keep_parts: bool = True
) -> list[dict[str, Any]]:
    """Messages ready for a template. `keep_parts`: several parts of a content stay a list; otherwise they become lines of one
    text.
    Raises RequestError: `param` is the path of what is wrong."""
    return [_normalize(message, f"{field}[{index}]", keep_parts) for index, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], path: str, keep_parts: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        allowed = "'system', 'user', 'assistant', 'tool', or what the template knows"
        raise _wrong(f"{path}.role", f"expected a string: {allowed}{instead_of('role', message)}.")
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    plain["content"] = _content(message, role, path, keep_parts)
    if "reasoning" in plain:  # the name that templates know
        plain.setdefault("reasoning_content", plain["reasoning"])
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{path}.tool_calls")
        if not plain["tool_calls"]:
            del plain["tool_calls"]  # templates ask whether it is there
    for key in ("name", "tool_call_id"):
        if key in plain and not isinstance(plain[key], str):
            raise _wrong(f"{path}.{key}", "expected a string.")
    return plain


def _content(message: Mapping[str, Any], role: str, path: str, keep_parts: bool) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    field = f"{path}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if role == "user":
            raise _wrong(field, f"this field is required{instead_of('content', message)}.")
        return None if message.get("tool_calls") else ""
    if isinstance(content, list | tuple):
        parts = [part for part in content if not _is_empty(part)]
        if any(isinstance(part, MediaPart) for part in parts):
            each = enumerate(parts)
            return [
                part if isinstance(part, MediaPart) else _as_part(part, f"{field}[{index}]") for index, part in each
            ]
        texts = [_text_of(part, f"{field}[{index}]") for index, part in enumerate(parts)]
        if keep_parts and len(texts) > 1:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)
    raise _wrong(field, "expected a string or a list of parts.")


def _as_part(part: Any, path: str) -> dict[str, str]:
    return {"type": "text", "text": _text_of(part, path)}


def _is_empty(part: Any) -> bool:
    """Whether a part of text has none."""
    return isinstance(part, dict) and part.get("type") in TEXT_PARTS and part.get("text", 0) is None


def _text_of(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _wrong(path, "expected an object with a type.")
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in TEXT_PARTS:
        raise (
            _unsupported_part(str(kind).removesuffix("_url"), part.path)  # "image": not OpenAI's word
            if isinstance(part, PlacedPart)
            else _unsupported_part(kind, path)
        )
    text = part.get("text", part.get(str(kind)))
    if not isinstance(text, str):
        raise _wrong(f"{path}.text", "expected a string.")
    return text


def _unsupported_part(kind: Any, path: str) -> RequestError:
    if not isinstance(kind, str):
        return _wrong(f"{path}.type", "expected a string.")
    message = f"{kind[:60]!r} content is not supported by this model; allowed: 'text'."
    return NotSupportedError(f"{path}.type: {message}", param=f"{path}.type")


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(path, "expected a list.")
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Templates want the arguments as an object; the protocol carries them as JSON text. What is no object becomes an empty one:
    a call that a model did not finish would be refused in every later turn of its conversation."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(f"{path}.function.name", "expected a string.")
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except TooDeepError as error:
            raise _wrong(f"{path}.function.arguments", f"{error}.") from None
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        if function.get("arguments") is not None:
            logger.warning("%s.function.arguments is no JSON object; the template is told of an empty one.", path)
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _wrong(path: str, why: str) -> RequestError:
    return RequestError(f"{path}: {why}", param=path)


def with_media(
    taken: MediaMessages,
    items: Sequence[Any],
    rendered: str | list[int],
    processor: InputProcessor,
    special: bool,
    options: dict[str, Any] | None = None,
) -> TokenizedPrompt:
    """The prompt that a template made of a conversation, with the conversation's media in their markers' places.
    Raises RequestError: one cannot be used, or the template shows other than all of them."""
    if isinstance(rendered, list):
        prompt = TokenizedPrompt(rendered)
    else:
        tokenizer = processor.require_tokenizer()
        token_ids = taken.tokenize(
            rendered, lambda text, is_first: tokenizer.encode(text, add_special_tokens=special and is_first)
        )
        prompt = TokenizedPrompt(token_ids, taken.text(rendered))
    if not items and processor.halves is None:
        return prompt
    data: dict[str, list[Any]] = {}
    uuids: dict[str, list[str | None]] = {}
    fields: dict[str, list[str]] = {}
    for each, item in zip(taken.given, items, strict=True):
        data.setdefault(each.modality, []).append(item)
        uuids.setdefault(each.modality, []).append(each.uuid)
        fields.setdefault(each.modality, []).append(each.field)
    given = {"multi_modal_data": data, "multi_modal_uuids": uuids, "mm_processor_kwargs": options}
    return processor.with_media(prompt, given, fields)
