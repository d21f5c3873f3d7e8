"""The server's application, called in this process: a request in, a whole answer out, no socket between.

`metrics_port` shows its `/metrics` to whoever scrapes a long run. Knows ASGI. Knows nothing of routes or of what bodies mean.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

from quire.errors import ConfigError


class Answer(NamedTuple):
    """What the application answered."""

    status: int
    headers: dict[str, str]
    body: bytes


async def call_app(app: ASGIApp, method: str, path: str, body: bytes = b"") -> Answer:
    """One request; it is there at once, and its client waits for ever."""
    query: str
    path, _, query = path.partition("?")
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, parts = 500, list[tuple[bytes, bytes]](), list[bytes]()

    async def receive() -> Message:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def send(message: Any) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, {name.decode(): value.decode() for name, value in headers}, b"".join(parts))


HEAD_TIMEOUT_S = 10.0
PATH = "/metrics"


@contextlib.asynccontextmanager
async def metrics_port(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """While this context lasts; gives the port (0 takes any that is free).
    Raises ConfigError: the port cannot be opened."""

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
