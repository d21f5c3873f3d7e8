"""Asks an application of this process: a request in, a whole answer out, no socket between."""

import asyncio
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope


class Answer(NamedTuple):
    """What the application answered."""

    status: int
    headers: dict[str, str]
    body: bytes


async def call_app(app: ASGIApp, method: str, path: str, body: bytes = b"", api_key: str | None = None) -> Answer:
    """One request; its whole body is there at once, and its client never leaves."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [] if api_key is None else [(b"authorization", f"Bearer {api_key}".encode())]
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
        "headers": headers,
        "client": None,
        "state": {"is_batch_line": True},
        "server": None,
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, answered, parts = 500, list[tuple[bytes, bytes]](), list[bytes]()

    async def receive() -> Message:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def send(message: Any) -> None:
        nonlocal status, answered
        if message["type"] == "http.response.start":
            status, answered = message["status"], list(message.get("headers", ()))
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, {name.decode(): value.decode() for name, value in answered}, b"".join(parts))
