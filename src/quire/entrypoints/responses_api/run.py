"""A response in the making: from a prepared job to its events, its end, and what is kept of it.

Parsers are those of chat completions; the protocol's own forms are in `events.py`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from quire.entrypoints.openai.errors import HTTPError, error_of_finished, from_exception
from quire.entrypoints.openai.generation import TokenCount, check_output, closable, start_generation
from quire.entrypoints.openai.logprobs import chat_logprobs
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.responses_api.prepare import ResponseJob
from quire.entrypoints.responses_api.protocol import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from quire.entrypoints.responses_api.store import Missing, Record
from quire.logger import init_logger
from quire.outputs import CompletionOutput

logger = init_logger(__name__)
_encode = msgspec.json.Encoder().encode
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


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
        if not job.is_over:
            raise error_of_finished(None, job.request_id)
    except Exception as error:
        if job.is_over or not opened:
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
    response.usage, response.metrics = _usage(job.count), job.count.timing()
    return job.writer.lifecycle(response.status)


def _usage(count: TokenCount) -> ResponseUsage:
    return ResponseUsage(
        count.prompt,
        InputTokensDetails(count.cached or 0),
        count.completion,
        OutputTokensDetails(_num_thoughts(count)),
        count.prompt + count.completion,
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
