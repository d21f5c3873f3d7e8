"""A streamed answer that is written where the engine's news arrive: all streams of a step in one pass, no task wakes.

The head and the end of the answer go through ASGI; what lies between is written into the connection's body
(`http_protocol.DirectBody`) by a callback. A client that reads slowly is not written to until it has caught up: the engine
keeps what comes meanwhile, once. Knows no chunk formats: an `AnswerStream` has them.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.request_stream import RequestStream
from quire.entrypoints.openai.http_protocol import DirectBody, direct_body
from quire.entrypoints.openai.streaming import (
    OPENAI_STREAM,
    STREAM_HEADERS,
    ClientGone,
    StreamProtocol,
    failure_event,
    start_event_stream,
)
from quire.outputs import RequestOutput


class AnswerStream(Protocol):
    """One streamed answer.

    Attributes:
        public_id: named in the error event of a failure.
        takes_text: `write_text` may be used where nothing but text has come.
    """

    public_id: str
    takes_text: bool

    async def open(self) -> RequestStream | None:
        """Queue the request; None where it cannot be pushed: then `events` is used."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Everything but the protocol's end, for whoever pulls."""
        ...

    def write(self, output: RequestOutput) -> bytes:
        """An output as chunks."""
        ...

    def write_text(self, text: str, token_ids: list[int]) -> bytes:
        """New text of the only choice, after a first `write`."""
        ...

    def end(self) -> bytes:
        """The last chunks."""
        ...


async def stream_answer(request: Request, answer: AnswerStream, protocol: StreamProtocol = OPENAI_STREAM) -> Response:
    """A stream's response, once its first event is there, so that a request which is refused gets a status."""
    body = direct_body(request.scope)
    source = await answer.open() if body is not None else None
    if body is None or source is None:
        return await start_event_stream(answer.events(), answer.public_id, protocol)
    try:
        output = await source.next()
        assert isinstance(output, RequestOutput)
        first = answer.write(output)
    except BaseException:
        source.close()
        raise
    return PushedStream(first, output.finished, answer, source, body, protocol)


class PushedStream(Response):
    """The response of a pushed stream.

    Args:
        first: events that are there already; `is_finished`: they are all of them.
    """

    def __init__(
        self,
        first: bytes,
        is_finished: bool,
        answer: AnswerStream,
        source: RequestStream,
        body: DirectBody,
        protocol: StreamProtocol,
    ) -> None:
        super().__init__()
        self.raw_headers = list(STREAM_HEADERS)
        self._rest = first
        self._answer = answer
        self._takes_text = answer.takes_text
        self._source = source
        self._body = body
        self._protocol = protocol
        self._failure: Exception | None = None
        self._ended = asyncio.get_running_loop().create_future()
        if is_finished:
            self._ended.set_result(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if not self._ended.done():
                await send({"type": "http.response.body", "body": self._rest, "more_body": True})
                self._rest = b""
                await self._push_until_end()
            await send({"type": "http.response.body", "body": self._last_events(), "more_body": False})
        finally:
            self._source.push_to(_ignore)
            self._source.close()

    async def _push_until_end(self) -> None:
        """Returns when the answer has ended.

        Raises:
            ClientGone: nobody reads it any more.
        """
        body = self._body
        try:
            body.open(self._push)
            body.on_gone = self._end
            self._source.push_to(self._push)
            self._push()
            if not body.is_gone:
                await self._ended
            if body.is_gone:
                raise ClientGone
        finally:
            body.close()
            body.on_gone = None

    def _push(self) -> None:
        """There are news, or there is room: write what has come, if the client has room for it."""
        if not self._body.is_writable:
            return
        try:
            news = self._source.take_text() if self._takes_text else None
            data = self._take() if news is None else self._answer.write_text(*news)
        except Exception as error:
            self._failure = error
            self._end()
            return
        if data:
            self._body.write(data)

    def _end(self) -> None:
        """There will be nothing more to push: all is there, or nobody reads."""
        self._body.close()
        self._source.push_to(_ignore)
        if not self._ended.done():
            self._ended.set_result(None)

    def _take(self) -> bytes:
        """What has come, as events; what comes with the end is left for `_last_events`."""
        while (output := self._source.take()) is not None:
            assert isinstance(output, RequestOutput)
            self._rest += self._answer.write(output)
            if output.finished:
                self._end()
                return b""
        events, self._rest = self._rest, b""
        return events

    def _last_events(self) -> bytes:
        if self._failure is not None:
            end = failure_event(self._failure, self._answer.public_id, self._protocol)
        else:
            end = self._answer.end()
        return self._rest + end + self._protocol.end


def _ignore() -> None:
    """Nobody is told any more."""
