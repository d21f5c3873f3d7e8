"""A streamed answer that is written where the engine's outputs arrive: all streams of a step in one pass, no task wakes.

The head and the end of the answer go through ASGI; what lies between is written into the connection's body
(`http_protocol.DirectBody`) by a callback. A client that reads slowly is not written to until it has caught up: the engine
keeps what comes meanwhile, once. Events that are long (the logprobs of a long prompt) are made and written in pieces, between
which others have their turn. Knows no chunk formats: an `AnswerStream` has them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.request_stream import OutputStream
from quire.entrypoints.http.http_protocol import DirectBody, direct_body
from quire.entrypoints.http.long_bodies import AT_ONCE, Turns
from quire.entrypoints.http.streaming import EVENTS, ClientGone, EventStream, stream_headers
from quire.outputs import AnyOutput, RequestOutput

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every reader of events passes over."""
Events = bytes | Iterator[bytes]
"""The events of an output: at once, or in pieces where they are long."""


class AnswerStream(Protocol):
    """One streamed answer, as its protocol's events.

    Attributes:
        takes_text: `write_text` may be used where nothing but text has come.
    """

    takes_text: bool

    async def open(self) -> OutputStream:
        """Queue the request."""
        ...

    def write(self, output: RequestOutput) -> Events:
        """An output's events. Raises what it says of a failure."""
        ...

    def write_text(self, text: str) -> bytes:
        """The events of new text of the only choice, after a first `write`. Its tokens come with a later output."""
        ...

    async def end(self, error: Exception | None) -> bytes:
        """The last events; `error` is why there are no more, if the answer is not complete."""
        ...


async def stream_answer(
    request: Request, answer: AnswerStream, interval: float = 0.0, content_type: bytes = EVENTS
) -> Response:
    """A stream's response, once its first event is there, so that a request which is refused gets a status. A sign of life is
    enough, where one is wanted after so many seconds (`interval`); it is a comment between events."""
    source = await answer.open()
    try:
        first = await _next_events(answer, source, interval)
    except BaseException:
        source.close()
        raise
    body = direct_body(request.scope)
    if body is None:
        return EventStream(_all(first, answer, source, interval), content_type)
    return PushedStream(first, answer, source, body, interval, content_type)


async def _next_events(answer: AnswerStream, source: OutputStream, interval: float) -> Events:
    """The events of the next output, or a sign of life if none comes for so many seconds (0: waits for ever)."""
    try:
        return answer.write(_generated(await asyncio.wait_for(source.next(), interval or None)))
    except TimeoutError:
        return KEEP_ALIVE


async def _all(
    events: Events, answer: AnswerStream, source: OutputStream, interval: float
) -> AsyncGenerator[bytes, None]:
    """The first events and what follows them, for a connection without a direct body."""
    failure: Exception | None = None
    turns = Turns()
    try:
        while True:
            for piece in (events,) if isinstance(events, bytes) else events:
                yield piece
                await turns.pass_on()
            if source.is_over:
                break
            events = await _next_events(answer, source, interval)
    except Exception as error:
        failure = error
    finally:
        source.close()
    yield await answer.end(failure)


def _generated(output: AnyOutput) -> RequestOutput:
    assert isinstance(output, RequestOutput)
    return output


class PushedStream(Response):
    """The response of a pushed stream.

    Args:
        first: events that are there already.
        interval: seconds after which a silent stream gives a sign of life; 0 for never.
        content_type: of the whole.
    """

    def __init__(
        self,
        first: Events,
        answer: AnswerStream,
        source: OutputStream,
        body: DirectBody,
        interval: float = 0.0,
        content_type: bytes = EVENTS,
    ) -> None:
        super().__init__()
        self.raw_headers = stream_headers(content_type)
        self._waiting = deque([first])
        self._answer = answer
        self._takes_text = answer.takes_text
        self._source = source
        self._body = body
        self._failure: Exception | None = None
        self._interval = interval
        self._was_silent = True
        self._ended = asyncio.get_running_loop().create_future()
        self._is_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            first = await self._send_long(send)
            if not self._source.is_over:
                await send({"type": "http.response.body", "body": first, "more_body": True})
                await self._push_until_end()
                first = await self._send_long(send)
            last = first + await self._answer.end(self._failure)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._source.close()

    async def _send_long(self, send: Send) -> bytes:
        """Send what waits in pieces; what is left of it is short."""
        left, turns = b"", Turns()
        while self._waiting:
            events = self._waiting.popleft()
            for piece in (events,) if isinstance(events, bytes) else events:
                left += piece
                if len(left) > AT_ONCE:
                    await send({"type": "http.response.body", "body": left, "more_body": True})
                    left = b""
                    await turns.pass_on()
        return left

    async def _push_until_end(self) -> None:
        """Returns when the answer has ended. Raises ClientGone if the client has gone."""
        body = self._body
        timer: asyncio.TimerHandle | None = None

        def keep_alive() -> None:
            nonlocal timer
            if self._was_silent and body.is_writable and not self._waiting:  # not within an event
                body.write(KEEP_ALIVE)
            self._was_silent = True
            timer = asyncio.get_running_loop().call_later(self._interval, keep_alive)

        try:
            body.open(self._push)
            body.on_gone = self._end
            if self._interval:
                timer = asyncio.get_running_loop().call_later(self._interval, keep_alive)
            self._source.push_to(self._push)
            self._push()
            if not body.is_gone:
                await self._ended
            if body.is_gone:
                raise ClientGone
        finally:
            if timer is not None:
                timer.cancel()
            self._is_ended = True
            body.close()
            body.on_gone = None

    def _push(self) -> None:
        """Called when outputs have come or the client has caught up: write what has come, if the client can take it."""
        body = self._body
        if not body.is_writable or self._is_ended:
            return
        try:
            text = self._source.take_text() if self._takes_text else None
            data = self._take() if text is None else text and self._answer.write_text(text)
            if data:
                self._was_silent = False
                body.write(data)
        except Exception as error:
            self._failure = error
            self._end()

    def _end(self) -> None:
        """There will be nothing more to push: the answer is complete, or the client has gone."""
        if not self._is_ended:
            self._is_ended = True
            if not self._ended.done():  # its task was cancelled in the meantime
                self._ended.set_result(None)

    def _take(self) -> bytes:
        """What has come, as events; what comes with the end is left for the last ones. Of long ones a piece."""
        data = b""
        while True:
            while self._waiting:
                events = self._waiting[0]
                for piece in (events,) if isinstance(events, bytes) else events:
                    data += piece
                    if len(data) > AT_ONCE and events is not piece:
                        asyncio.get_running_loop().call_soon(self._push)
                        return data
                self._waiting.popleft()
            try:
                output = self._source.take()
            except Exception:
                self._waiting.appendleft(data)
                raise
            if output is None:
                return data
            self._waiting.append(self._answer.write(_generated(output)))
            if self._source.is_over:
                self._waiting.appendleft(data)
                self._end()
                return b""
