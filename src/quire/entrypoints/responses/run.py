"""A response in the making: from a checked request to its events, its end, and what is kept of it; also in the background.

Parsers are those of chat completions; the protocol's own shapes are in `events.py`.
"""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from quire.engine.request_stream import OutputStream
from quire.entrypoints.database import Missing
from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.long_bodies import encode
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import failure_of
from quire.entrypoints.openai.answers import PieceReader
from quire.entrypoints.openai.chat_generation import ChatGeneration
from quire.entrypoints.openai.logprobs import chat_logprobs
from quire.entrypoints.openai.protocol import UNSET, TokenLogprob
from quire.entrypoints.responses import protocol
from quire.entrypoints.responses.events import EventWriter, OpenItem, error_event
from quire.entrypoints.responses.store import Record
from quire.logger import init_logger
from quire.outputs import AnyOutput, CompletionOutput, RequestOutput
from quire.parsers.pieces import Piece
from quire.sampling_params import SamplingParams

logger = init_logger(__name__)

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class LeftResponse(msgspec.Struct):
    """A background response in the middle, as a server leaves it to its successor.

    Attributes:
        request, items: what it was asked for, and its own items.
        token_ids: those whose text is in the response or its open item; the model goes on behind them.
        events: told so far, where it streams.
    """

    request: protocol.ResponsesRequest
    items: list[dict[str, Any]]
    response: protocol.ResponseObject
    prompt_token_ids: list[int]
    prompt: str | None
    seed: int
    max_tokens: int
    token_ids: list[int]
    writer: OpenItem
    events: list[bytes]


class ResponseJob:
    """A checked request, and the response that it becomes; it writes its events, too. See `push.AnswerStream`.

    Attributes:
        items: the request's own input, normalized.
        has_stream: the client wants events.
    """

    def __init__(
        self,
        request: protocol.ResponsesRequest,
        chat: ChatGeneration,
        response: protocol.ResponseObject,
        items: list[dict[str, Any]],
    ) -> None:
        self.request = request
        self.chat = chat
        self.response = response
        self._told: list[int] = []
        self.items = items
        self.has_stream = bool(request.stream)
        self.takes_text = not chat.request.logprobs and response.output_messages is UNSET
        self._reader = PieceReader(chat.reader)
        self._writer = EventWriter(response, chat.reader.call_id)
        self._opened = False
        self._unwritten: list[TokenLogprob] = []
        self._ends_as: protocol.Status = "failed"

    @property
    def is_over(self) -> bool:
        return self.response.status not in protocol.RUNNING

    async def open(self) -> OutputStream:
        return await self.chat.open()

    def events(self, output: RequestOutput) -> list[bytes]:
        """An output's events, but for the response's end."""
        response, (choice,) = self.response, output.outputs
        if response.background:
            self._told += choice.token_ids
        parts = [(part, self.chat.count.add_choice(part)) for part in choice.by_token()]
        self.chat.note(output)
        for message in response.output_messages or ():
            message.message += choice.text
            message.tokens += choice.token_ids
        events: list[bytes] = []
        if not self._opened:
            self._opened = True
            if not response.background:
                events.append(self.tell("created"))
            response.status = "in_progress"
            events.append(self.tell("in_progress"))
        for part, num_thoughts in parts:
            self._add_logprobs(part, num_thoughts)
            for piece in self._reader.read(part):
                events += self._writer.write(piece, self._unwritten if piece.kind == "content" else ())
                self._unwritten = []
        if choice.finish_reason is not None:
            events += self._finish(choice.finish_reason)
        return events

    def tell(self, happened: str) -> bytes:
        """The event that the response is created, queued, in progress or over."""
        return self._writer.lifecycle(happened)

    def write(self, output: RequestOutput) -> bytes:
        return b"".join(self.events(output))

    def write_text(self, text: str) -> bytes:
        reader, writer = self._reader, self._writer
        if (kind := reader.plain_kind(text)) is not None and kind == writer.kind:
            return writer.write_delta(text)
        pieces = reader.read_text(text) if kind is None else [Piece(kind, text)]
        return b"".join([event for piece in pieces for event in writer.write(piece)])

    def _add_logprobs(self, choice: CompletionOutput, num_thoughts: int) -> None:
        """Logprobs of tokens go with the next text that is written; those of thoughts come first and are left out."""
        request = self.chat.request
        if request.logprobs and choice.logprobs is not None:
            tokenizer = self.chat.reader.tokenizer
            told = chat_logprobs(choice.token_ids, choice.logprobs, request.top_logprobs or 0, False, tokenizer)
            self._unwritten += (told.content or [])[num_thoughts:]

    def _finish(self, reason: str) -> list[bytes]:
        """The generation has ended."""
        self._ends_as = "completed"
        if reason == "length":
            self._ends_as = "incomplete"
            self.response.incomplete_details = protocol.IncompleteDetails("max_output_tokens")
        elif reason == "abort":
            self._ends_as = "cancelled"
        if self._ends_as != "completed":
            return self._writer.close("incomplete")
        events = self._writer.close("completed")
        return events if self.response.output else events + self._writer.write_nothing()

    def complete(self) -> list[bytes]:
        """The last event of a response whose generation has ended."""
        response, count = self.response, self.chat.count
        response.status = self._ends_as
        response.completed_at = int(time.time()) if response.status == "completed" else None
        response.usage = protocol.ResponseUsage(
            count.prompt,
            protocol.InputTokensDetails(count.cached or 0, count.created),
            count.completion,
            protocol.OutputTokensDetails(count.num_thoughts),
            count.prompt + count.completion,
        )
        response.metrics = count.timing() or UNSET
        return [self.tell(response.status)]

    def fail(self, error: Exception) -> list[bytes]:
        """The last events of a response that failed."""
        answer = failure_of(error, self.chat.public_id)
        code = _ERROR_CODES.get(answer.status, "server_error")
        self.response.error = protocol.ResponseError(code, answer.detail.message)
        return self._cut("failed")

    def cancel(self) -> list[bytes]:
        """The last events of a response whose generation has been stopped."""
        return self._cut("cancelled")

    def _cut(self, status: protocol.Status) -> list[bytes]:
        self._ends_as = status
        return [*self._writer.close("incomplete"), *self.complete()]

    async def end(self, error: Exception | None) -> bytes:
        """The response is complete, or has failed; it is kept before its end is told."""
        events = self.complete() if error is None else self.fail(error)
        try:
            await self.keep()
        except Exception as failure:
            return error_event(failure_of(failure, self.chat.public_id))
        return b"".join(events)

    async def outputs(self) -> AsyncGenerator[list[bytes], None]:
        """Generates; gives each output's events."""
        stream = await self.open()
        if self.chat.resumed:
            self._read_again(await stream.next())
        async with aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                assert isinstance(output, RequestOutput)
                yield self.events(output)

    # What one server leaves to the next.

    def left(self, events: list[bytes]) -> LeftResponse | None:
        """The response as it is now; None where it cannot go on elsewhere."""
        chat, params = self.chat, self.chat.params
        if self.is_over or chat.request.logprobs or not isinstance(params, SamplingParams):
            return None
        return LeftResponse(
            request=self.request,
            items=self.items,
            response=self.response,
            prompt_token_ids=list(chat.prompt.token_ids),
            prompt=chat.prompt.text,
            seed=params.seed or 0,
            max_tokens=params.max_tokens or 0,
            token_ids=self._told,
            writer=self._writer.state(),
            events=events,
        )

    def restore(self, left: LeftResponse) -> None:
        """Go on with what another server has begun."""
        chat, params = self.chat, self.chat.params
        assert isinstance(params, SamplingParams), "responses have no beams"
        self.response, self.items = left.response, left.items
        self._told, self._opened = list(left.token_ids), bool(left.token_ids)
        self._writer.restore(left.response, left.writer)
        chat.prompt = dataclasses.replace(chat.prompt, token_ids=left.prompt_token_ids, text=left.prompt, array=None)
        chat.count.prompt, chat.resumed = len(left.prompt_token_ids), left.token_ids
        params.seed, params.max_tokens = left.seed, left.max_tokens

    def _read_again(self, output: AnyOutput) -> None:
        """The tokens that another server has told of: parsers and counts come to where they were."""
        assert isinstance(output, RequestOutput)
        for part in output.outputs[0].by_token():
            self.chat.count.add_choice(part)
            self._reader.read(part)

    async def keep(self, events: Sequence[bytes] | None = None) -> None:
        """Keep the response as it is now, unless the client does not want that."""
        response = self.response
        if not response.store:
            return
        body, given = encode(response), encode(self.items)
        stream = None if events is None else b"".join(events)
        item_ids = [item.id for item in response.output]
        record = Record(response.id, response.previous_response_id, not self.is_over, body, given, stream, item_ids)
        await asyncio.shield(self.chat.state.responses.save(record))


async def answer_response(job: ResponseJob) -> protocol.ResponseObject:
    """The whole response of a request that is not streamed."""
    async for _ in job.outputs():
        pass
    job.complete()
    await job.keep()
    return job.response


async def find(state: ServerState, response_id: str) -> Record:
    """A response that was kept. Raises a 404."""
    try:
        record = await state.responses.get(response_id)
    except Missing:
        raise not_found(response_id) from None
    if (
        record.is_running and response_id not in state.handed_over
    ):  # and not in this process: it ended with the one that made it
        response = msgspec.json.decode(record.body, type=protocol.ResponseObject)
        response.status = "failed"
        response.error = protocol.ResponseError("server_error", "The server ended before the response was complete.")
        record.body, record.is_running = encode(response), False
    return record


def not_found(response_id: str) -> HTTPError:
    message = f"Response with id {response_id[:100]!r} not found; responses are kept for 30 days at most."
    return HTTPError(404, message, param="response_id", code="response_not_found")


class BackgroundRun:
    """A response in the making, which a draining server waits for; in `state.background` until it is over and kept.

    Args:
        events: told by the server that began it.

    Attributes:
        on_kept: called when it is over and kept.
    """

    on_kept: Callable[[], None] | None = None

    def __init__(self, job: ResponseJob, events: Sequence[bytes] = ()) -> None:
        self.job = job
        self._state = job.chat.state
        self._events = list(events)
        self._is_new = not events and not job.chat.resumed
        params = job.chat.params
        if isinstance(params, SamplingParams) and params.seed is None:
            params.seed = secrets.randbits(63)  # known here, so that another server can go on with the same draws
        self._news = asyncio.Event()
        self._is_over = False
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Keep the response as one that waits, and begin."""
        await self.job.keep()
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

    async def leave(self) -> LeftResponse | None:
        """Stop for good, and give what another server needs to go on; None if it is over, or has to end here."""
        left = self.job.left(self._events)
        if left is not None and self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        return left

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events behind the one with number `after`, as they come."""
        position = after + 1
        while True:
            if position < len(self._events):
                events, position = self._events[position:], len(self._events)
                yield b"".join(events)
            elif self._is_over:
                return
            else:
                await self._news.wait()

    async def _run(self) -> None:
        try:
            if self._is_new:
                self._add([self.job.tell("created"), self.job.tell("queued")])
            await self._end(await self._generate())
            if self.on_kept is not None:
                self.on_kept()
        except Exception:
            logger.exception("Response %s could not be kept.", self.job.chat.public_id)
        finally:
            self._is_over = True
            self._wake()
            del self._state.background[self.job.response.id]
            self._state.end_request()

    async def _generate(self) -> list[bytes]:
        """Add events but the last, which are returned."""
        try:
            async with aclosing(self.job.outputs()) as outputs:
                async for events in outputs:
                    self._add(events)
            return self.job.complete()
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            return self.job.cancel()
        except Exception as error:
            return self.job.fail(error)

    async def _end(self, events: list[bytes]) -> None:
        """The last events are told when the response has been kept."""
        await self.job.keep([*self._events, *events] if self.job.has_stream else None)
        self._add(events)

    def _add(self, events: list[bytes]) -> None:
        if self.job.has_stream:
            self._events += events
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
