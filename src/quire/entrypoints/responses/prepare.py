"""From a request to `/v1/responses` to a job that can run: what came before, the prompt, and the response while it is empty.

The request, with the conversation before it, becomes a chat completion request, which everything behind it understands.
"""

from collections.abc import Sequence
from typing import Any

from quire.entrypoints.database import Missing
from quire.entrypoints.http.errors import HTTPError, bad_field, object_at, one_of, string_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.media_parts import Content, PlacedPart, content_of, join_content
from quire.entrypoints.openai.chat_generation import ChatGeneration, prepare_generation
from quire.entrypoints.openai.prompts import count_prompt_tokens, hold_media
from quire.entrypoints.openai.protocol import ChatCompletionRequest, RequestFields, ResponseFormat
from quire.entrypoints.responses import protocol
from quire.entrypoints.responses.protocol import InputTokensRequest, ReasoningConfig, ResponsesRequest, new_id
from quire.entrypoints.responses.run import ResponseJob
from quire.entrypoints.responses.store import StillRunning
from quire.json_text import parse_json
from quire.sampling_params import SamplingParams

Fields = dict[str, Any]
REFERENCE = "item_reference"
_ITEMS = ("message", "reasoning", "function_call", "function_call_output", REFERENCE)
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_FORMATS = ("text", "json_object", "json_schema")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS,
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"),
    "code_interpreter_call.outputs",
)


# --- items ---


def normalize_input(given: str | list[Fields]) -> list[Fields]:
    """The input as items that have a type and an id, as they are kept and listed.
    Raises HTTPError, a 400 whose `param` is the path of what is wrong."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise bad_field("input", "at least one item is needed.")
    return [normalize_item(item, f"input[{index}]") for index, item in enumerate(given)]


def normalize_item(item: Fields, path: str) -> Fields:
    """An item with a type and an id. Raises HTTPError, a 400 whose `param` is the path of what is wrong."""
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str):
        raise bad_field(f"{path}.type", f"expected a string, one of {', '.join(_ITEMS)}.")
    if kind not in _ITEMS:
        raise _unsupported(f"{path}.type", kind, _ITEMS)
    if kind == REFERENCE:
        return {"type": kind, "id": string_field(item, "id", path)}
    normal: Fields = {**item, "type": kind, "id": item.get("id") or new_id(kind)}
    string_field(normal, "id", path)
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        normal["content"] = [{"type": part, "text": item["content"]}]
    return normal


def _unsupported(path: str, value: Any, allowed: Sequence[str]) -> HTTPError:
    message = f"{str(value)[:60]!r} is not supported here; allowed: {', '.join(allowed)}."
    return bad_field(path, message, "not_supported")


def _text(content: Any, path: str) -> str:
    """A text, or the texts of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(path, "expected a string or a list of parts.")
    return "\n".join(_part(object_at(part, f"{path}[{i}]"), f"{path}[{i}]") for i, part in enumerate(content))


def _content(content: Any, path: str) -> Content:
    """A text; or parts, where there are images or sounds among them."""
    if not isinstance(content, list):
        return _text(content, path)
    placed = [(object_at(part, f"{path}[{i}]"), f"{path}[{i}]") for i, part in enumerate(content)]
    return content_of([_media(*each) or _part(*each) for each in placed])


def _media(part: Fields, path: str) -> PlacedPart | None:
    """An image or a sound as chat completions have it; None for a text."""
    if isinstance(part, PlacedPart):
        return part
    kind, image, sound = part.get("type"), f"{path}.image_url", f"{path}.input_audio"
    if kind == "input_image" and part.get("file_id"):
        raise bad_field(f"{path}.file_id", "files are not kept here; give image_url.", "not_supported")
    if kind == "input_image":
        return PlacedPart({"type": "image_url", "image_url": string_field(part, "image_url", path)}, path, image)
    if kind == "input_audio":
        return PlacedPart({"type": kind, kind: object_at(part.get(kind), sound)}, path, sound)
    return None


def _part(part: Fields, path: str) -> str:
    kind = string_field(part, "type", path)
    if kind not in _TEXT_PARTS:
        raise _unsupported(f"{path}.type", kind, ("input_text", "output_text", "input_image", "input_audio", "refusal"))
    return string_field(part, "refusal" if kind == "refusal" else "text", path)


class ItemTurns:
    """Messages made of items. What one speaker says in several items is one turn: many templates want speakers to alternate."""

    def __init__(self) -> None:
        self.messages: list[Fields] = []
        self._names: dict[str, str] = {}

    def add(self, item: Fields, path: str) -> None:
        match item["type"]:
            case "message":
                self._say(item, path)
            case "reasoning":
                self._think(item, path)
            case "function_call":
                self._call(item, path)
            case _:
                self._give_result(item, path)

    def say(self, role: str, content: Content) -> None:
        last = self._turn(role)
        last["content"] = join_content(last["content"], content)

    def _turn(self, role: str) -> Fields:
        """The turn of a speaker, which may have begun before."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _say(self, item: Fields, path: str) -> None:
        role = _ROLES[one_of(item.get("role"), _ROLES, f"{path}.role")]
        self.say(role, _content(item.get("content"), f"{path}.content"))

    def _think(self, item: Fields, path: str) -> None:
        name = "content" if item.get("content") else "summary"
        text = _text(item.get(name) or [], f"{path}.{name}")
        if not text:
            return
        turn = self._turn("assistant")
        if turn["content"] or "tool_calls" in turn:
            turn = {"role": "assistant", "content": ""}
            self.messages.append(turn)
        turn["reasoning"] = f"{turn['reasoning']}\n{text}" if "reasoning" in turn else text

    def _call(self, item: Fields, path: str) -> None:
        call_id, name = string_field(item, "call_id", path), string_field(item, "name", path)
        arguments = string_field(item, "arguments", path)
        try:
            parse_json(arguments or "{}")
        except ValueError as error:
            if item.get("status") == "incomplete":  # an answer that was cut off within a call
                return
            raise bad_field(f"{path}.arguments", f"not valid JSON: {error}.") from None
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def _give_result(self, item: Fields, path: str) -> None:
        call_id = string_field(item, "call_id", path)
        if call_id not in self._names:
            raise bad_field(f"{path}.call_id", f"there is no function_call {call_id[:100]!r} before its output.")
        result = _content(item.get("output"), f"{path}.output")
        name = self._names[call_id]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": result})

    def check_end(self) -> None:
        if not self.messages:
            raise bad_field("input", "there is no message in it.")
        if calls := self.messages[-1].get("tool_calls"):
            raise bad_field("input", f"the function_call {calls[-1]['id'][:100]!r} has no function_call_output.")


# --- the request ---


def to_chat_request(
    request: InputTokensRequest | ResponsesRequest, history: list[Fields], items: list[Fields]
) -> ChatCompletionRequest:
    """The same request as a chat completion request; without a limit of tokens.
    Raises HTTPError, a 400 whose `param` is the path of what is wrong.

    Args:
        history: the items of the conversation before, which were checked when they were new.
        items: the request's own, normalized.
    """
    conversation = ItemTurns()
    if request.instructions:
        conversation.say("system", request.instructions)
    for item in history:
        conversation.add(item, "previous_response_id")
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    conversation.check_end()
    last = items[-1]
    chat = ChatCompletionRequest(
        messages=conversation.messages,
        model=request.model,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())] or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        chat_template_kwargs=request.chat_template_kwargs,
        continue_final_message=last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete"),
    )
    _set_effort(chat, request.reasoning)
    if request.text is not None:
        chat.verbosity = request.text.verbosity
        chat.response_format = _format(request.text.format)
    for field in ("conversation", "prompt"):
        if getattr(request, field):
            raise bad_field(field, "this field is not supported here.", "not_supported")
    if isinstance(request, ResponsesRequest):
        _set_generation(chat, request)
    return chat


def _set_generation(chat: ChatCompletionRequest, request: ResponsesRequest) -> None:
    for field in ("moderation", "previous_input_messages"):
        if getattr(request, field):
            raise bad_field(field, "this field is not supported here.", "not_supported")
    for name in RequestFields.__struct_fields__:
        setattr(chat, name, getattr(request, name))
    chat.include_reasoning = request.include_reasoning
    for index, name in enumerate(request.include or ()):
        if name not in _INCLUDABLE:
            raise _unsupported(f"include[{index}]", name, _INCLUDABLE)
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    chat.stream = bool(request.stream or chat.logprobs)  # a stream's tell whose text is whose


def _tool(tool: Fields, path: str) -> Fields:
    kind = string_field(tool, "type", path)
    if kind != "function":
        message = f"{kind[:60]!r} is not run here; allowed: 'function', which the client runs."
        raise bad_field(f"{path}.type", message, "not_supported")
    function: Fields = {"name": string_field(tool, "name", path)}
    if tool.get("description") is not None:
        function["description"] = string_field(tool, "description", path)
    function["parameters"] = object_at(tool.get("parameters") or {}, f"{path}.parameters")
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Fields | None) -> str | Fields | None:
    """As chat completions have it, which read `allowed_tools` as either protocol writes it."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = string_field(choice, "type", "tool_choice")
    if kind == "function":
        return {"type": kind, "function": {"name": string_field(choice, "name", "tool_choice")}}
    if kind != "allowed_tools":
        raise _unsupported("tool_choice.type", kind, ("function", "allowed_tools"))
    return choice


def _set_effort(chat: ChatCompletionRequest, reasoning: ReasoningConfig | None) -> None:
    """Templates know the effort, or a switch, which has two names."""
    if reasoning is None or reasoning.effort is None:
        return
    thinks = reasoning.effort != "none"
    chat.reasoning_effort = reasoning.effort
    chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks} | (chat.chat_template_kwargs or {})


def _format(given: Fields | None) -> ResponseFormat | None:
    if given is None:
        return None
    kind = string_field(given, "type", "text.format")
    if kind not in _FORMATS:
        raise _unsupported("text.format.type", kind, _FORMATS)
    if kind != "json_schema":
        return ResponseFormat(type=kind)
    schema = object_at(given.get("schema"), "text.format.schema")
    return ResponseFormat(type=kind, json_schema={"name": given.get("name"), "schema": schema})


async def prepare_response(state: ServerState, request: protocol.ResponsesRequest) -> ResponseJob:
    """Check a request and tokenize its prompt. Raises what the client must be told."""
    if request.background and request.store is False:
        raise bad_field("background", "background can only be used when `store` is true.")
    chat_request, items = await _conversation(state, request)
    response_id = protocol.new_id("resp")
    public_id = request.request_id or response_id
    chat = await prepare_generation(
        state, chat_request, public_id, "input", request.max_output_tokens, "text.format.schema"
    )
    return ResponseJob(request, chat, _response(request, chat, response_id), items)


async def count_input_tokens(state: ServerState, request: protocol.InputTokensRequest) -> protocol.InputTokensResponse:
    """How many tokens a request's prompt has."""
    state.resolve_model(request.model)
    chat_request, _ = await _conversation(state, request)
    return protocol.InputTokensResponse(await count_prompt_tokens(state, chat_request))


async def _conversation(
    state: ServerState, request: protocol.InputTokensRequest | protocol.ResponsesRequest
) -> tuple[ChatCompletionRequest, list[Fields]]:
    """The request as a chat, and its own items."""
    items = await _resolve_references(state, normalize_input(request.input))
    history: list[Fields] = []
    if request.previous_response_id:
        try:
            history = await state.responses.conversation(request.previous_response_id)
        except Missing as missing:
            message = f"Response with id {missing.args[0][:100]!r} not found."
            raise bad_field("previous_response_id", message, "previous_response_not_found") from None
        except StillRunning as running:
            raise bad_field("previous_response_id", f"the response {running.args[0]!r} is not complete.") from None
    chat = to_chat_request(request, history, items)
    if request.truncation == "auto":
        asked = request.max_output_tokens if isinstance(request, protocol.ResponsesRequest) else None
        await _truncate(state, chat, asked)
    return chat, items


async def _resolve_references(state: ServerState, items: list[Fields]) -> list[Fields]:
    """Items of earlier outputs in the place of their ids."""
    wanted = {item["id"] for item in items if item["type"] == REFERENCE}
    if not wanted:
        return items
    found = await state.responses.items(wanted)
    for index, item in enumerate(items):
        if item["type"] == REFERENCE and item["id"] not in found:
            message = f"Item with id {item['id'][:100]!r} not found."
            raise bad_field(f"input[{index}].id", message, "item_not_found")
    return [found[item["id"]] if item["type"] == REFERENCE else item for item in items]


async def _truncate(state: ServerState, chat: ChatCompletionRequest, asked: int | None) -> None:
    """Drop the conversation's oldest turns, but not its instructions, until an answer fits behind it.

    An answer needs `max_output_tokens`, or one token where they are not given; never more than half of the context.
    """
    limit = state.engine.config.model.max_model_len
    room = limit - min(asked or 1, limit // 2)
    messages = await hold_media(state, chat.messages)
    num_fixed = 1 if messages[0]["role"] == "system" else 0
    starts = [index for index, message in enumerate(messages) if message["role"] == "user" and index > num_fixed]

    async def fits(num_dropped: int) -> bool:
        chat.messages = messages[:num_fixed] + messages[starts[num_dropped - 1] :] if num_dropped else messages
        return await count_prompt_tokens(state, chat) <= room

    if await fits(0) or not starts:
        return
    low, high = 1, len(starts)
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    chat.messages = messages[:num_fixed] + messages[starts[low - 1] :]


def _raw(
    request: protocol.ResponsesRequest, text: str, tokens: list[int]
) -> list[protocol.RawMessage] | protocol.Optional:
    """What the model reads or writes, where the request wants to see it."""
    return [protocol.RawMessage(text, tokens)] if request.enable_response_messages else protocol.UNSET


def _response(request: protocol.ResponsesRequest, chat: ChatGeneration, response_id: str) -> protocol.ResponseObject:
    """A response before there is any output; what the request left out is told as it was chosen."""
    given = request.reasoning or protocol.ReasoningConfig()
    text = request.text or protocol.TextConfig()
    assert isinstance(chat.params, SamplingParams)
    return protocol.ResponseObject(
        id=response_id,
        created_at=chat.created,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=chat.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=protocol.ReasoningConfig(effort=given.effort, summary=given.summary),
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=chat.params.temperature,
        text=protocol.TextConfig(format=text.format or {"type": "text"}, verbosity=text.verbosity),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=chat.params.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        input_messages=_raw(request, chat.prompt.text or "", chat.prompt.token_ids),
        output_messages=_raw(request, "", []),
    )
