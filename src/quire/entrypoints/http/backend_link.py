"""One request to another server, by asyncio alone: the answer's head, then its body as it comes.

Knows HTTP/1.1. Knows nothing of protocols, replicas or what to do when a server fails.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from quire.entrypoints.http_client import Target

Headers = list[tuple[bytes, bytes]]

HEAD_LIMIT = 1 << 16
_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"proxy-authorization"}
)
_OURS = _HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}


class BackendGone(Exception):
    """The server cannot be reached, or its answer has broken off."""


class Answer:
    """A server's answer, whose head has come. Attributes: status, headers: without those of the connection."""

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: Headers, *, has_body: bool) -> None:
        self._reader = reader
        self.status = status
        self.headers = [(name, value) for name, value in headers if name not in _HOP]
        found = dict(headers)
        self._is_chunked = b"chunked" in found.get(b"transfer-encoding", b"").lower()
        self._length = int(found[b"content-length"]) if b"content-length" in found else None
        self._has_body = has_body
        self.is_stream = found.get(b"content-type", b"").startswith(b"text/event-stream")

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Its parts. Raises BackendGone: the connection ended before the answer did."""
        if not self._has_body:
            return
        try:
            if self._is_chunked:
                while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield await self._reader.readexactly(size)
                    await self._reader.readexactly(2)
            elif self._length is not None:
                left = self._length
                while left:
                    part = await self._reader.read(min(left, 1 << 16))
                    if not part:
                        raise BackendGone("the connection ended within the answer")
                    left -= len(part)
                    yield part
            else:
                while part := await self._reader.read(1 << 16):
                    yield part
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise BackendGone(f"the answer broke off: {error or type(error).__name__}") from None

    async def whole(self) -> bytes:
        """All of it. Raises BackendGone: the connection ended before the answer did."""
        return b"".join([part async for part in self.body()])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream, each with the empty line behind it. Raises BackendGone."""
        rest = b""
        async with contextlib.aclosing(self.body()) as parts:
            async for part in parts:
                *whole, rest = (rest + part).split(b"\n\n")
                for event in whole:
                    yield event + b"\n\n"


async def _connect(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if target.uds:
        return await asyncio.open_unix_connection(target.uds, limit=HEAD_LIMIT)
    return await asyncio.open_connection(target.host, target.port, ssl=target.tls_context(), limit=HEAD_LIMIT)


@contextlib.asynccontextmanager
async def exchange(
    target: Target, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> AsyncGenerator[Answer, None]:
    """Send a request; gives its answer. Leaving closes the connection, which ends the request.
    Raises BackendGone: the server cannot be reached, or does not answer in HTTP."""
    try:
        reader, writer = await _connect(target)
    except OSError as error:
        raise BackendGone(f"{target.url} cannot be reached: {error}") from None
    try:
        host = f"[{target.host}]" if ":" in target.host else target.host
        lines = [
            f"{method} {target.base_path}{path} HTTP/1.1".encode("latin-1"),
            f"host: {host}:{target.port}".encode(),
        ]
        lines += [name + b": " + value for name, value in headers if name.lower() not in _OURS]
        lines += [b"connection: close", b"content-length: %d" % len(body)]
        try:
            writer.write(b"\r\n".join((*lines, b"", body)))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            first, *rest = head[:-4].split(b"\r\n")
            status = int(first.split(b" ", 2)[1])
            pairs = [line.partition(b":") for line in rest]
        except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise BackendGone(f"{target.url} gave no answer: {error or type(error).__name__}") from None
        named = [(name.strip().lower(), value.strip()) for name, _, value in pairs]
        has_body = method != "HEAD" and status not in (204, 304)
        yield Answer(reader, status, named, has_body=has_body)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ask_within(
    seconds: float,
    target: Target,
    method: str,
    path: str,
    headers: Sequence[tuple[bytes, bytes]] = (),
    body: bytes = b"",
) -> bytes | None:
    """What a server answers with status 200; None where it answers something else, or not in so many seconds."""
    with contextlib.suppress(BackendGone, TimeoutError):
        async with asyncio.timeout(seconds), exchange(target, method, path, headers, body) as answer:
            told = await answer.whole()
            return told if answer.status == 200 else None
    return None
