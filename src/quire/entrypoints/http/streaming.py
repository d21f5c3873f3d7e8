"""Answers that live as long as their client does: the event stream, and a wait that ends when the client goes.

Nothing here polls: a disconnect is the ASGI message that the server hands over when it happens. Ending the generator is
what aborts the request in the engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.entrypoints.http.errors import HTTPError, from_exception
from quire.entrypoints.http.http_protocol import DirectBody, direct_body
from quire.errors import DeadlineError, EngineDeadError, ShutdownError
from quire.logger import init_logger

logger = init_logger(__name__)
ResultT = TypeVar("ResultT")

EVENTS = b"text/event-stream; charset=utf-8"


def stream_headers(content_type: bytes) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that nothing on the way may hold back."""
    return [(b"content-type", content_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has closed its connection, or the answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is cancelled when the client goes away.
    Raises ClientGone if the client goes away first."""
    body = direct_body(request.scope)
    if body is not None:
        return await _run_in_this_task(body, work)
    return await run_beside(request.receive, work)


async def run_beside(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """As `run_while_connected`, of a request whose body has been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancel(watcher)
        await cancel(task)


async def _run_in_this_task(body: DirectBody, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """As `run_while_connected`, without other tasks: the connection itself tells of the client's end."""
    task = asyncio.current_task()
    assert task is not None
    if body.is_gone:
        work.close()
        raise ClientGone

    def cancel_work() -> None:
        task.cancel()

    body.on_gone = cancel_work
    try:
        return await work
    except asyncio.CancelledError:
        if body.is_gone and not task.uncancel():
            raise ClientGone from None
        raise
    finally:
        body.on_gone = None


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Cancel and wait, so that generators inside have run their `finally`."""
    if task.done():
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


class EventStream(Response):
    """A stream, of server-sent events for example, that is pulled from a generator.

    A slow reader holds back `send`, so that at most one write's worth is buffered here.

    Args:
        events: with the protocol's end and what is said of failures. They are closed, whatever happens.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], content_type: bytes = EVENTS) -> None:
        super().__init__()
        self.raw_headers = stream_headers(content_type)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await run_beside(receive, self._pump(send))
        finally:
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def failure_of(error: Exception, request_id: str) -> HTTPError:
    """What is answered to an exception, whole or as the end of a stream; a failure of ours leaves its cause in the log."""
    answer = from_exception(error, request_id)
    if isinstance(error, EngineDeadError):  # its cause is in the log already, once
        logger.error("Request %s was cut off: the engine has died.", request_id)
    elif isinstance(error, DeadlineError):
        logger.warning("Request %s was given up: %s.", request_id, error)
    elif answer.status >= 500 and not isinstance(error, HTTPError | ShutdownError):  # of these the log has said it
        logger.error("Request %s failed.", request_id, exc_info=error)
    return answer
