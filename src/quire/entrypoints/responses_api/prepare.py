"""From a request to `/v1/responses` to a job that can run: what came before, the prompt, and the response while it is empty."""

import dataclasses
import time
from typing import Any

from quire.entrypoints.openai.answers import PieceReader
from quire.entrypoints.openai.chat import ChatJob, prepare_chat, token_count
from quire.entrypoints.openai.errors import bad_field
from quire.entrypoints.openai.generation import TokenCount
from quire.entrypoints.openai.prompts import chat_prompt
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.entrypoints.openai.responses import TokenLogprob
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.responses_api import protocol
from quire.entrypoints.responses_api.conversion import REFERENCE, normalize_input, to_chat_request
from quire.entrypoints.responses_api.events import EventWriter
from quire.entrypoints.responses_api.store import Missing, StillRunning
from quire.sampling_params import SamplingParams

Fields = dict[str, Any]


@dataclasses.dataclass(slots=True)
class ResponseJob:
    """A checked request, ready to run.

    Attributes:
        response: what it becomes.
        items: the request's own input, normalized.
        request_id: the name in the engine and in the log.
        unwritten: logprobs of tokens whose text the parser still holds back.
        ended_as: the response's last status, once that is known.
    """

    request: protocol.ResponsesRequest
    chat: ChatJob
    response: protocol.ResponseObject
    items: list[Fields]
    request_id: str
    reader: PieceReader
    writer: EventWriter
    count: TokenCount
    unwritten: list[TokenLogprob] = dataclasses.field(default_factory=list[TokenLogprob])
    ended_as: protocol.Status = "failed"

    @property
    def is_over(self) -> bool:
        return self.response.status not in protocol.RUNNING


async def prepare_response(state: ServerState, request: protocol.ResponsesRequest) -> ResponseJob:
    """Check a request and tokenize its prompt. Raises what the client must be told."""
    if request.background and request.store is False:
        raise bad_field("background", "what nobody waits for must be kept; store must not be false.")
    chat_request, items = await _conversation(state, request)
    chat = await prepare_chat(state, chat_request, "", prompt_field="input")
    assert isinstance(chat.params, SamplingParams)
    if request.max_output_tokens is not None:
        room = state.engine.config.model.max_model_len - len(chat.prompt.token_ids)
        chat.params.max_tokens = min(request.max_output_tokens, room)
    response = _response(request, chat)
    reader = PieceReader(chat.reader)
    return ResponseJob(
        request,
        chat,
        response,
        items,
        request_id=request.request_id or response.id,
        reader=reader,
        writer=EventWriter(response, reader.call_id),
        count=token_count(state, chat),
    )


async def count_input_tokens(state: ServerState, request: protocol.InputTokensRequest) -> protocol.InputTokensResponse:
    """How many tokens a request's prompt has."""
    state.resolve_model(request.model)
    chat_request, _ = await _conversation(state, request)
    limit = state.engine.config.model.max_model_len
    prompt = await chat_prompt(chat_request, state.engine.get_tokenizer(), None, limit, state.settings)
    return protocol.InputTokensResponse(len(prompt.token_ids))


async def _conversation(
    state: ServerState, request: protocol.InputTokensRequest
) -> tuple[ChatCompletionRequest, list[Fields]]:
    """The request as a chat, and its own items."""
    items = await _resolve_references(state, normalize_input(request.input))
    history: list[Fields] = []
    if request.previous_response_id:
        try:
            history = await state.responses.conversation(request.previous_response_id)
        except Missing as missing:
            message = f"there is no response {missing.args[0][:100]!r} here, or no longer."
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
            message = f"there is no item {item['id'][:100]!r} here, or no longer."
            raise bad_field(f"input[{index}].id", message, "item_not_found")
    return [found[item["id"]] if item["type"] == REFERENCE else item for item in items]


async def _truncate(state: ServerState, chat: ChatCompletionRequest, asked: int | None) -> None:
    """Drop the conversation's oldest turns, but not its instructions, until an answer fits behind it.

    An answer needs `max_output_tokens`, or one token where they are not given; never more than half of the context.
    """
    limit = state.engine.config.model.max_model_len
    room = limit - min(asked or 1, limit // 2)
    messages, tokenizer = chat.messages, state.engine.get_tokenizer()
    num_fixed = 1 if messages[0]["role"] == "system" else 0
    starts = [index for index, message in enumerate(messages) if message["role"] == "user" and index > num_fixed]

    async def fits(num_dropped: int) -> bool:
        chat.messages = messages[:num_fixed] + messages[starts[num_dropped - 1] :] if num_dropped else messages
        return len((await chat_prompt(chat, tokenizer, None, limit, state.settings)).token_ids) <= room

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


def _response(request: protocol.ResponsesRequest, chat: ChatJob) -> protocol.ResponseObject:
    """A response before there is any output; what the request left out is told as it was chosen."""
    given = request.reasoning or protocol.ReasoningConfig()
    text = request.text or protocol.TextConfig()
    assert isinstance(chat.params, SamplingParams)
    return protocol.ResponseObject(
        id=protocol.new_id("resp"),
        created_at=int(time.time()),
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
    )
