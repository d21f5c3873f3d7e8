"""A response in the making: from a prepared job to its events, its end, and what is kept of it; also while nobody waits for it.

Parsers are those of chat completions; the protocol's own forms are in `events.py`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from quire.engine.request_stream import OutputStream
from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import failure_of
from quire.entrypoints.openai.chat import open_chat
from quire.entrypoints.openai.generation import TokenCount, check_output
from quire.entrypoints.openai.logprobs import chat_logprobs
from quire.entrypoints.openai.protocol import UNSET
from quire.entrypoints.responses import protocol
from quire.entrypoints.responses.events import error_event
from quire.entrypoints.responses.prepare import ResponseJob
from quire.entrypoints.responses.store import Missing, Record
from quire.logger import init_logger
from quire.outputs import CompletionOutput, RequestOutput
from quire.parsers.pieces import Piece
from quire.tokenizers.interface import Tokenizer

logger = init_logger(__name__)

_encode = msgspec.json.Encoder().encode
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseStream:
    """Writes a response's events; it is kept before its end is told. See `push.AnswerStream`."""

    def __init__(self, state: ServerState, job: ResponseJob) -> None:
        self._state = state
        self._job = job
        self._opened = False
        self.takes_text = not job.chat.request.logprobs and job.response.output_messages is UNSET

    async def open(self) -> OutputStream:
        return await open_chat(self._state, self._job.chat, self._job.request_id)

    def events(self, output: RequestOutput) -> list[bytes]:
        """An output's events, but for the response's end."""
        job, (choice,) = self._job, output.outputs
        parts = [(part, job.count.add_choice(part)) for part in choice.by_token()]
        check_output(output, job.request_id)
        job.count.add_times(output)
        for message in job.response.output_messages or ():
            message.message += choice.text
            message.tokens += choice.token_ids
        events: list[bytes] = []
        if not self._opened:
            self._opened = True
            job.count.add_cached(output)
            if not job.response.background:
                events.append(job.writer.lifecycle("created"))
            job.response.status = "in_progress"
            events.append(job.writer.lifecycle("in_progress"))
        for part, num_thoughts in parts:
            _add_logprobs(job, part, num_thoughts, self._state.engine.get_tokenizer())
            for piece in job.reader.read(part):
                events += job.writer.write(piece, job.unwritten if piece.kind == "content" else ())
                job.unwritten = []
        if choice.finish_reason is not None:
            events += _finish(job, choice.finish_reason)
        return events

    def write(self, output: RequestOutput) -> bytes:
        return b"".join(self.events(output))

    def write_text(self, text: str) -> bytes:
        reader, writer = self._job.reader, self._job.writer
        if (kind := reader.plain_kind(text)) is not None and kind == writer.kind:
            return writer.write_delta(text)
        pieces = reader.read_text(text) if kind is None else [Piece(kind, text)]
        return b"".join([event for piece in pieces for event in writer.write(piece)])

    async def end(self, error: Exception | None) -> bytes:
        """The response is complete, or has failed, and is kept."""
        events = end(self._job) if error is None else fail(self._job, error)
        try:
            await keep(self._state, self._job)
        except Exception as failure:
            return error_event(failure_of(failure, self._job.request_id))
        return b"".join(events)


def _add_logprobs(job: ResponseJob, choice: CompletionOutput, num_thoughts: int, tokenizer: Tokenizer | None) -> None:
    """Logprobs of tokens go with the next text that is written; those of thoughts come first and are left out."""
    if job.chat.request.logprobs and choice.logprobs is not None:
        top = job.chat.request.top_logprobs or 0
        told = chat_logprobs(choice.token_ids, choice.logprobs, top, False, tokenizer).content or []
        job.unwritten += told[num_thoughts:]


def _finish(job: ResponseJob, reason: str) -> list[bytes]:
    response, writer = job.response, job.writer
    job.ended_as = "completed"
    if reason == "length":
        job.ended_as, response.incomplete_details = "incomplete", protocol.IncompleteDetails("max_output_tokens")
    elif reason == "abort":
        job.ended_as = "cancelled"
    is_complete = job.ended_as == "completed"
    events = writer.close("completed" if is_complete else "incomplete")
    if is_complete and not response.output:
        events += writer.write_nothing()
    return events


def end(job: ResponseJob) -> list[bytes]:
    """The last event of a response whose generation has ended."""
    response = job.response
    response.status = job.ended_as
    response.completed_at = int(time.time()) if response.status == "completed" else None
    response.usage, response.metrics = _usage(job.count), job.count.timing() or UNSET
    return [job.writer.lifecycle(response.status)]


def _usage(count: TokenCount) -> protocol.ResponseUsage:
    return protocol.ResponseUsage(
        count.prompt,
        protocol.InputTokensDetails(count.cached or 0, count.created),
        count.completion,
        protocol.OutputTokensDetails(count.num_thoughts),
        count.prompt + count.completion,
    )


def fail(job: ResponseJob, error: Exception) -> list[bytes]:
    """The last events of a response that failed."""
    answer = failure_of(error, job.request_id)
    job.ended_as = "failed"
    code = _ERROR_CODES.get(answer.status, "server_error")
    job.response.error = protocol.ResponseError(code, answer.detail.message)
    return [*job.writer.close("incomplete"), *end(job)]


def cancel(job: ResponseJob) -> list[bytes]:
    """End a response whose generation has been stopped."""
    job.ended_as = "cancelled"
    return [*job.writer.close("incomplete"), *end(job)]


async def answer_response(state: ServerState, job: ResponseJob) -> protocol.ResponseObject:
    """The whole response of a request that is not streamed."""
    stream = ResponseStream(state, job)
    async with aclosing((await stream.open()).outputs()) as outputs:
        async for output in outputs:
            assert isinstance(output, RequestOutput)
            stream.events(output)
    end(job)
    await keep(state, job)
    return job.response


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
        response = msgspec.json.decode(record.body, type=protocol.ResponseObject)
        response.status = "failed"
        response.error = protocol.ResponseError("server_error", "The server ended before the response was complete.")
        record.body, record.is_running = _encode(response), False
    return record


def not_found(response_id: str) -> HTTPError:
    message = f"Response with id {response_id[:100]!r} not found; responses are kept for 30 days at most."
    return HTTPError(404, message, param="response_id", code="response_not_found")


class BackgroundRun:
    """A response in the making, which a draining server waits for; in `state.background` until it is over and kept."""

    def __init__(self, state: ServerState, job: ResponseJob) -> None:
        self.job = job
        self._state = state
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self._is_over = False
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None

    @property
    def has_stream(self) -> bool:
        return bool(self.job.request.stream)

    async def start(self) -> None:
        """Keep the response as one that waits, and begin."""
        await keep(self._state, self.job)
        self._state.background[self.job.response.id] = self
        self._state.begin_request()
        self._task = asyncio.ensure_future(self._run())
        await asyncio.sleep(0)  # a task that is cancelled before it has begun would not end what was begun here

    async def cancel(self) -> None:
        """Stop, unless it is over; returns when it is."""
        assert self._task is not None
        if not self.job.is_over:
            self._is_cancelled = True
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events behind the one with number `after`, as they come."""
        position = after + 1
        while True:
            if position < len(self._events):
                events, position = self._events[position:], len(self._events)
                yield b"".join(events)
            elif self._is_over:
                yield b""
                return
            else:
                await self._news.wait()

    async def _run(self) -> None:
        try:
            self._add([self.job.writer.lifecycle("created"), self.job.writer.lifecycle("queued")])
            await self._end(await self._generate())
        except Exception:
            logger.exception("Response %s could not be kept.", self.job.request_id)
        finally:
            self._is_over = True
            self._wake()
            del self._state.background[self.job.response.id]
            self._state.end_request()

    async def _generate(self) -> list[bytes]:
        """Add events but the last, which are returned."""
        stream = ResponseStream(self._state, self.job)
        try:
            async with aclosing((await stream.open()).outputs()) as outputs:
                async for output in outputs:
                    assert isinstance(output, RequestOutput)
                    self._add(stream.events(output))
            return end(self.job)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            return cancel(self.job)
        except Exception as error:
            return fail(self.job, error)

    async def _end(self, events: list[bytes]) -> None:
        """The last events are told when the response has been kept."""
        await keep(self._state, self.job, [*self._events, *events] if self.has_stream else None)
        self._add(events)

    def _add(self, events: list[bytes]) -> None:
        if self.has_stream:
            self._events += events
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
