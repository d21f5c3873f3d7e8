"""`/metrics` of an application that has no server, on a port of its own, for whoever scrapes a long run.

Knows just enough HTTP for one GET a connection.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp

from quire.entrypoints.cli.in_process import call_app
from quire.errors import ConfigError

HEAD_TIMEOUT_S = 10.0
PATH = "/metrics"


@contextlib.asynccontextmanager
async def metrics_port(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """While this context lasts; gives the port (0 takes any that is free).

    Raises:
        ConfigError: the port cannot be opened.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(await _answer(app, head))
            await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(handle, host, port)
    except OSError as error:
        raise ConfigError.of("port", f"cannot listen on {host}:{port}: {error.strerror or error}.") from None
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _answer(app: ASGIApp, head: bytes) -> bytes:
    method, _, rest = head.partition(b" ")
    status, kind, body = 404, "text/plain", b"only GET /metrics is here\n"
    if method == b"GET" and rest.partition(b" ")[0].partition(b"?")[0] == PATH.encode():
        answer = await call_app(app, "GET", PATH)
        status, kind, body = answer.status, answer.headers.get("content-type", kind), answer.body
    lines = (
        f"HTTP/1.1 {status} -",
        f"content-type: {kind}",
        f"content-length: {len(body)}",
        "connection: close",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body
