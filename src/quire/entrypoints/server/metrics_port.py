"""`GET /metrics` on a port of its own, for a process that is no server."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

from starlette.types import ASGIApp

from quire.entrypoints.http.call import Answer, call_app
from quire.errors import ConfigError

HEAD_TIMEOUT_S = 10.0
METRICS_REQUEST = re.compile(rb"GET /metrics[ ?]")


@contextlib.asynccontextmanager
async def metrics_port(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """Answer `GET /metrics` while this context lasts; gives the port (0 takes any that is free).
    Raises ConfigError: the port cannot be opened."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            answer = Answer(404, {"content-type": "text/plain"}, b"only GET /metrics is here\n")
            if METRICS_REQUEST.match(head):
                answer = await call_app(app, "GET", "/metrics")
            kind, length = answer.headers.get("content-type", "text/plain"), len(answer.body)
            fields = f"content-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
            writer.write(f"HTTP/1.1 {answer.status} -\r\n{fields}".encode() + answer.body)
            await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(handle, host, port)
    except OSError as error:
        raise ConfigError.of("port", f"cannot listen on {host}:{port}: {error.strerror or error}.") from None
    async with server:
        yield server.sockets[0].getsockname()[1]
