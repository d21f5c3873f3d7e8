"""The server's application, called in this process: a request in, a whole answer out, no socket between.

Knows ASGI. Knows nothing of routes or of what bodies mean.
"""

import asyncio
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope


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
