"""Anthropic's messages → a chat completion request, which everything behind it understands.

Checks shapes, with the paths that the client wrote. Knows both protocols; knows nothing of templates, tokens or answers.
"""

import json
from collections.abc import Iterator
from typing import Any, cast

from quire.entrypoints import media_parts
from quire.entrypoints.anthropic.protocol import THREAD_NOT_FOUND, CountTokensRequest, MessagesRequest
from quire.entrypoints.http.errors import HTTPError, bad_field, bad_request, object_at, one_of, string_field
from quire.entrypoints.media_parts import Content, PlacedPart
from quire.entrypoints.openai.protocol import ChatCompletionRequest, ResponseFormat

Fields = dict[str, Any]
_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "adaptive", "disabled")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat_request(request: CountTokensRequest) -> ChatCompletionRequest:
    """The same request as a chat completion request; without `max_tokens`, which is limited by the prompt's length.
    Raises HTTPError, a 400 whose `param` is the path of what is wrong."""
    _check_thread(request.thread)
    system = [] if request.system is None else [{"role": "system", "content": _system(request.system)}]
    messages = _messages(request.messages)
    chat = ChatCompletionRequest(
        messages=system + messages,
        model=request.model,
        tools=_tools(request.tools),
        continue_final_message=messages[-1]["role"] == "assistant",
        chat_template_kwargs=request.chat_template_kwargs,
    )
    _set_tool_choice(chat, request.tool_choice)
    _set_thinking(chat, request.thinking)
    _set_output(chat, request.output_config or {})
    if isinstance(request, MessagesRequest):
        for field in ("container", "mcp_servers"):
            if getattr(request, field):
                raise _unsupported(field)
        chat.stream = request.stream
        chat.stop = request.stop_sequences or None
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.priority, chat.cache_salt = request.priority, request.cache_salt
        chat.vllm_xargs = request.vllm_xargs
    return chat


def _unsupported(path: str, value: Any = None, allowed: str = "") -> HTTPError:
    shown = "" if value is None else f" {str(value)[:60]!r}"
    return bad_request(f"{path}:{shown} is not supported here{allowed}.", path, "not_supported")


def _check_thread(thread: Fields | None) -> None:
    """Nothing is kept between requests: one that begins a thread has all its messages, one that continues it lacks those before.

    Anthropic's clients then send the whole conversation.
    """
    if thread is None or (kind := thread.get("type")) == "create":
        return
    if kind != "continue":
        raise bad_field("thread.type", f"{str(kind)[:60]!r} is unknown; allowed: 'create', 'continue'.")
    kept = str(thread.get("previous_message_id"))[:100]
    message = (
        f"thread.previous_message_id: {kept!r} is not kept here; send all messages, with a thread of type 'create'."
    )
    raise HTTPError(404, message, param="thread.previous_message_id", code=THREAD_NOT_FOUND)


# --- messages ---


def _messages(messages: list[Fields]) -> list[Fields]:
    if not messages:
        raise bad_field("messages", "at least one message is needed.")
    converted: list[Fields] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role, content = one_of(message.get("role"), _ROLES, f"{path}.role"), message.get("content")
        if isinstance(content, str):
            converted.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise bad_field(f"{path}.content", "expected a string or a list of blocks.")
        elif role == "assistant":
            converted.append(_assistant(_blocks(content, f"{path}.content"), names))
        else:
            converted += _turn(role, _blocks(content, f"{path}.content"), names)
    converted = _joined(converted)
    if converted[-1]["role"] == "assistant" and "tool_calls" in converted[-1]:
        raise bad_field("messages", "tool_use blocks must be followed by their tool_result blocks.")
    return converted


def _joined(messages: list[Fields]) -> list[Fields]:
    """Turns of one speaker that follow one another are one turn: many templates want speakers to alternate."""
    joined: list[Fields] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message.keys() == last.keys() == {"role", "content"} and message["role"] == last["role"]:
            last["content"] = media_parts.join_content(last["content"], message["content"])
        else:
            joined.append(message)
    return joined


def _blocks(content: list[Any], path: str) -> list[tuple[str, Fields, str]]:
    """Each block with its type and path."""
    found: list[tuple[str, Fields, str]] = []
    for index, block in enumerate(content):
        fields = object_at(block, f"{path}[{index}]")
        found.append((string_field(fields, "type", f"{path}[{index}]"), fields, f"{path}[{index}]"))
    return found


def _assistant(blocks: list[tuple[str, Fields, str]], names: dict[str, str]) -> Fields:
    """The assistant's turn; notes which call has which name."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Fields] = []
    for kind, block, path in blocks:
        match kind:
            case "text":
                texts.append(string_field(block, "text", path))
            case "thinking":
                thoughts.append(string_field(block, "thinking", path))
            case "redacted_thinking":
                pass
            case "tool_use":
                call_id, name = string_field(block, "id", path), string_field(block, "name", path)
                names[call_id] = name
                arguments = json.dumps(object_at(block.get("input"), f"{path}.input"), ensure_ascii=False)
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case _:
                raise _unsupported(f"{path}.type", kind)
    message: Fields = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _turn(role: str, blocks: list[tuple[str, Fields, str]], names: dict[str, str]) -> Iterator[Fields]:
    """A user's turn as messages in the order of its blocks: results of tools have messages of their own."""
    pieces: list[str | PlacedPart] = []
    for kind, block, path in blocks:
        if kind == "tool_result":
            if pieces:
                yield {"role": role, "content": media_parts.content_of(pieces)}
                pieces = []
            call_id = string_field(block, "tool_use_id", path)
            result = {"role": "tool", "tool_call_id": call_id, "content": _result(block.get("content"), path)}
            yield result | ({"name": names[call_id]} if call_id in names else {})
        else:
            pieces.append(_piece(kind, block, path))
    if pieces or not blocks:
        yield {"role": role, "content": media_parts.content_of(pieces)}


def _piece(kind: str, block: Fields, path: str) -> str | PlacedPart:
    """A text, or an image as chat completions have it."""
    if kind != "image":
        return _text(kind, block, path)
    field = f"{path}.source"
    source = object_at(block.get("source"), field)
    match string_field(source, "type", field):
        case "base64":
            data = string_field(source, "data", field)
            url = f"data:{string_field(source, 'media_type', field)};base64,{data}"
        case "url":
            url = string_field(source, "url", field)
        case other:
            raise _unsupported(f"{field}.type", other, "; allowed: 'base64', 'url'")
    return PlacedPart({"type": "image_url", "image_url": {"url": url}}, path, field)


def _text(kind: str, block: Fields, path: str) -> str:
    if kind == "text":
        return string_field(block, "text", path)
    if kind == "document":
        source = object_at(block.get("source"), f"{path}.source")
        if source.get("type") == "text":
            return string_field(source, "data", f"{path}.source")
        raise _unsupported(f"{path}.source.type", source.get("type"), "; allowed: 'text'")
    raise _unsupported(f"{path}.type", kind)


def _result(content: Any, path: str) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_field(f"{path}.content", "expected a string or a list of blocks.")
    blocks = _blocks(cast("list[Any]", content), f"{path}.content")
    return media_parts.content_of([_piece(kind, block, where) for kind, block, where in blocks])


def _system(system: str | list[Fields]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(_text(kind, block, path) for kind, block, path in _blocks(system, "system"))


# --- settings ---


def _tools(tools: list[Fields] | None) -> list[Fields] | None:
    if not tools:
        return None
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: Fields, path: str) -> Fields:
    if tool.get("type") not in (None, "custom"):  # tools that Anthropic itself runs
        raise _unsupported(f"{path}.type", tool["type"])
    function: Fields = {"name": string_field(tool, "name", path)}
    if tool.get("description") is not None:
        function["description"] = string_field(tool, "description", path)
    function["parameters"] = object_at(tool.get("input_schema"), f"{path}.input_schema")
    return {"type": "function", "function": function}


def _set_tool_choice(chat: ChatCompletionRequest, choice: Fields | None) -> None:
    if choice is None:
        return
    kind = one_of(string_field(choice, "type", "tool_choice"), (*_CHOICES, "tool"), "tool_choice.type")
    if kind == "tool":
        name = string_field(choice, "name", "tool_choice")
        chat.tool_choice = {"type": "function", "function": {"name": name}}
    else:
        chat.tool_choice = _CHOICES[kind]
    if choice.get("disable_parallel_tool_use") is True:
        chat.parallel_tool_calls = False


def _set_thinking(chat: ChatCompletionRequest, thinking: Fields | None) -> None:
    """Templates know two names of the switch. The budget is `messages.prepare_message`'s to set: not every model can keep one."""
    if thinking is None:
        return
    thinks = one_of(string_field(thinking, "type", "thinking"), _THINKING, "thinking.type") != "disabled"
    chat.include_reasoning = thinks
    chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks} | (chat.chat_template_kwargs or {})


def _set_output(chat: ChatCompletionRequest, output: Fields) -> None:
    if output.get("effort") is not None:
        chat.reasoning_effort = string_field(output, "effort", "output_config")
    if output.get("format") is not None:
        wanted = object_at(output["format"], "output_config.format")
        kind = string_field(wanted, "type", "output_config.format")
        if kind != "json_schema":
            raise bad_field("output_config.format.type", f"{kind[:60]!r} is unknown; allowed: 'json_schema'.")
        schema = object_at(wanted.get("schema"), "output_config.format.schema")
        chat.response_format = ResponseFormat(type=kind, json_schema={"name": "output", "schema": schema})
