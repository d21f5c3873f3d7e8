"""`POST /v1/responses`: from a typed request to a response or its events, kept afterwards.

Preparation, prompts and parsers are those of chat completions; the protocol's own forms are in `conversion.py` and `events.py`.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from quire.entrypoints.openai.answers import PieceReader
from quire.entrypoints.openai.chat import ChatJob, prepare_chat, token_count
from quire.entrypoints.openai.errors import HTTPError, bad_request, from_exception
from quire.entrypoints.openai.generation import TokenCount, check_output, closable, start_generation
from quire.entrypoints.openai.logprobs import chat_logprobs
from quire.entrypoints.openai.prompts import chat_prompt
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.entrypoints.openai.responses import TokenLogprob
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.responses_api.conversion import REFERENCE, normalize_input, to_chat_request
from quire.entrypoints.responses_api.events import EventWriter
from quire.entrypoints.responses_api.items import new_id
from quire.entrypoints.responses_api.protocol import (
    RUNNING,
    IncompleteDetails,
    InputTokensDetails,
    InputTokensRequest,
    InputTokensResponse,
    OutputTokensDetails,
    ReasoningConfig,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    TextConfig,
)
from quire.entrypoints.responses_api.store import Missing, Record, StillRunning
from quire.logger import init_logger
from quire.outputs import CompletionOutput
from quire.sampling_params import SamplingParams

logger = init_logger(__name__)
_encode = msgspec.json.Encoder().encode
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
Fields = dict[str, Any]


@dataclasses.dataclass(slots=True)
class ResponseJob:
    """A checked request, ready to run.

    Attributes:
        response: what it becomes.
        items: the request's own input, normalized.
        request_id: the name in the engine and in the log.
        unwritten: logprobs of tokens whose text the parser still holds back.
    """

    request: ResponsesRequest
    chat: ChatJob
    response: ResponseObject
    items: list[Fields]
    request_id: str
    reader: PieceReader
    writer: EventWriter
    count: TokenCount
    unwritten: list[TokenLogprob] = dataclasses.field(default_factory=list[TokenLogprob])

    @property
    def is_over(self) -> bool:
        return self.response.status not in RUNNING


async def prepare_response(state: ServerState, request: ResponsesRequest) -> ResponseJob:
    """Check a request and tokenize its prompt. Raises what the client must be told."""
    if request.background and request.store is False:
        raise bad_request("background: what nobody waits for must be kept; store must not be false.", "background")
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


async def count_input_tokens(state: ServerState, request: InputTokensRequest) -> InputTokensResponse:
    """How many tokens a request's prompt has."""
    state.resolve_model(request.model)
    chat_request, _ = await _conversation(state, request)
    limit = state.engine.config.model.max_model_len
    prompt = await chat_prompt(chat_request, state.engine.get_tokenizer(), None, limit)
    return InputTokensResponse(len(prompt.token_ids))


async def _conversation(state: ServerState, request: InputTokensRequest) -> tuple[ChatCompletionRequest, list[Fields]]:
    """The request as a chat, and its own items."""
    items = await _resolve_references(state, normalize_input(request.input))
    history: list[Fields] = []
    if request.previous_response_id:
        try:
            history = await state.responses.conversation(request.previous_response_id)
        except Missing as missing:
            message = f"previous_response_id: there is no response {missing.args[0][:100]!r} here, or no longer."
            raise bad_request(message, "previous_response_id", "previous_response_not_found") from None
        except StillRunning as running:
            message = f"previous_response_id: the response {running.args[0]!r} is not complete."
            raise bad_request(message, "previous_response_id") from None
    chat = to_chat_request(request, history, items)
    if request.truncation == "auto":
        asked = request.max_output_tokens if isinstance(request, ResponsesRequest) else None
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
            message = f"input[{index}].id: there is no item {item['id'][:100]!r} here, or no longer."
            raise bad_request(message, f"input[{index}].id", "item_not_found")
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
        return len((await chat_prompt(chat, tokenizer, None, limit)).token_ids) <= room

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


def _response(request: ResponsesRequest, chat: ChatJob) -> ResponseObject:
    """A response before there is any output; what the request left out is told as it was chosen."""
    given = request.reasoning or ReasoningConfig()
    text = request.text or TextConfig()
    assert isinstance(chat.params, SamplingParams)
    return ResponseObject(
        id=new_id("resp"),
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
        reasoning=ReasoningConfig(effort=given.effort, summary=given.summary),
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=chat.params.temperature,
        text=TextConfig(format=text.format or {"type": "text"}, verbosity=text.verbosity),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=chat.params.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )


# --- running ---


async def respond(state: ServerState, job: ResponseJob) -> AsyncGenerator[list[bytes], None]:
    """A response's events, some at a time; the last ones are there when `job.is_over`.

    A failure is raised while it can still be told by a status; later it is the response's own end.
    """
    response, writer, chat = job.response, job.writer, job.chat
    opening = [writer.lifecycle("created")]
    if response.background:
        yield [*opening, writer.lifecycle("queued")]
        opening = []
    opened = response.background
    try:
        outputs = start_generation(state, chat.request, chat.prompt, chat.params, job.request_id)
        async with aclosing(closable(outputs)) as source:
            began = False
            async for output in source:
                check_output(output, job.request_id)
                job.count.add_times(output)
                events: list[bytes] = []
                if not began:
                    began, opened = True, opened or bool(job.request.stream)
                    job.count.add_cached(output)
                    response.status = "in_progress"
                    events += [*opening, writer.lifecycle("in_progress")]
                events += _write(job, output.outputs[0])
                if events:
                    yield events
    except Exception as error:
        if not opened:
            raise
        yield _fail(job, error)


def _write(job: ResponseJob, choice: CompletionOutput) -> list[bytes]:
    """The events of a step; at the end the response is complete."""
    before = _num_thoughts(job.count)
    job.count.add_choice(choice)
    _add_logprobs(job, choice, _num_thoughts(job.count) - before)
    events: list[bytes] = []
    for piece in job.reader.read(choice):
        events += job.writer.write(piece, job.unwritten if piece.kind == "content" else ())
        job.unwritten = []
    if choice.finish_reason is not None:
        events += _finish(job, choice.finish_reason)
    return events


def _num_thoughts(count: TokenCount) -> int:
    return 0 if count.thoughts is None else count.thoughts.total


def _add_logprobs(job: ResponseJob, choice: CompletionOutput, num_thoughts: int) -> None:
    """A step's logprobs go with the next text that is written; those of its thoughts come first and are left out."""
    if job.chat.request.logprobs and choice.logprobs is not None:
        top = job.chat.request.top_logprobs or 0
        job.unwritten += (chat_logprobs(choice.token_ids, choice.logprobs, top, False).content or [])[num_thoughts:]


def _finish(job: ResponseJob, reason: str) -> list[bytes]:
    response, writer = job.response, job.writer
    response.status = "completed"
    if reason == "length":
        response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
    elif reason == "abort":
        response.status = "cancelled"
    is_complete = response.status == "completed"
    events = writer.close("completed" if is_complete else "incomplete")
    if is_complete and not response.output:
        events += writer.write_nothing()
    return [*events, _end(job)]


def _end(job: ResponseJob) -> bytes:
    response = job.response
    response.completed_at = int(time.time()) if response.status == "completed" else None
    response.usage = _usage(job.count)
    return job.writer.lifecycle(response.status)


def _usage(count: TokenCount) -> ResponseUsage:
    usage = count.usage()
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(count.cached or 0),
        usage.completion_tokens,
        OutputTokensDetails(_num_thoughts(count)),
        usage.total_tokens,
        usage.timing,
    )


def _fail(job: ResponseJob, error: Exception) -> list[bytes]:
    answer = from_exception(error, job.request_id)
    if answer.status >= 500:
        logger.error("Response %s failed.", job.request_id, exc_info=error)
    job.response.status = "failed"
    code = _ERROR_CODES.get(answer.status, "server_error")
    job.response.error = ResponseError(code, answer.detail.message)
    return [*job.writer.close("incomplete"), _end(job)]


def cancel(job: ResponseJob) -> list[bytes]:
    """End a response whose generation has been stopped."""
    job.response.status = "cancelled"
    return [*job.writer.close("incomplete"), _end(job)]


async def answer_response(state: ServerState, job: ResponseJob) -> ResponseObject:
    """The whole response of a request that is not streamed."""
    async with aclosing(respond(state, job)) as source:
        async for _ in source:
            pass
    await keep(state, job)
    return job.response


async def stream_response(state: ServerState, job: ResponseJob) -> AsyncGenerator[bytes, None]:
    """The events of a streamed response, which is kept before its end is told."""
    async with aclosing(respond(state, job)) as source:
        async for events in source:
            if job.is_over:
                await keep(state, job)
            yield b"".join(events)


# --- keeping ---


async def keep(state: ServerState, job: ResponseJob, events: Sequence[bytes] | None = None) -> None:
    """Keep a response as it is now, unless the client does not want that."""
    response = job.response
    if not response.store:
        return
    body, given = _encode(response), _encode(job.items)
    stream = None if events is None else b"".join(events)
    item_ids = [item.id for item in response.output]
    record = Record(response.id, response.previous_response_id, not job.is_over, body, given, stream, item_ids)
    await asyncio.shield(state.responses.save(record))


async def find(state: ServerState, response_id: str) -> Record:
    """A response that was kept. Raises a 404."""
    try:
        record = await state.responses.get(response_id)
    except Missing:
        raise not_found(response_id) from None
    if record.is_running:  # and not in this process: it ended with the one that made it
        response = msgspec.json.decode(record.body, type=ResponseObject)
        response.status = "failed"
        response.error = ResponseError("server_error", "The server ended before the response was complete.")
        record.body, record.is_running = _encode(response), False
    return record


def not_found(response_id: str) -> HTTPError:
    """A 404."""
    message = f"There is no response {response_id[:100]!r} here, or no longer."
    return HTTPError(404, message, param="response_id", code="response_not_found")
