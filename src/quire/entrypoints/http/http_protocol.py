"""uvicorn's httptools protocol with a bound on the request line and headers, and refusals in the protocol's shape.

uvicorn's httptools parser takes any number of headers of any size; a client could fill memory before a route sees it.
"""

import asyncio
import http
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.entrypoints.http.errors import HTTPError
from quire.logger import init_logger

logger = init_logger(__name__)
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADER_COUNT = 256
HEAD_TIMEOUT_S = 60.0
"""How long a new connection may take to send a request's head."""
BODY_EXTENSION = "quire.body"
"""Where in a request's ASGI extensions its `DirectBody` is."""
_OFFER = (b"upgrade", b"http2-settings")
_CHUNK_HEADS = tuple(b"%x\r\n" % size for size in range(2048))


class WriteBatch:
    """Chunks of many answers, sent one after the other at the end of the event loop's turn: what Python does for a token and what
    the kernel does for it stay in the processor's caches (a sixth less time for both than taking turns)."""

    def __init__(self) -> None:
        self.chunks: list[tuple[asyncio.WriteTransport, bytes]] = []

    def begin(self) -> None:
        """The turn's first chunk is about to be added."""
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what there is. A connection that fails is closed, and harms no other."""
        chunks, self.chunks = self.chunks, []
        for transport, data in chunks:
            size = len(data)
            head = _CHUNK_HEADS[size] if size < len(_CHUNK_HEADS) else b"%x\r\n" % size
            try:
                transport.write(b"".join((head, data, b"\r\n")))
            except Exception:
                if not transport.is_closing():  # whose client has just gone
                    logger.exception("A chunk could not be sent.")
                    transport.abort()


class DirectBody:
    """The body of a running answer, written to from anywhere in the event loop: no task wakes for a piece.

    The head is sent through ASGI before, the end after.

    Attributes:
        is_writable: the client is there, and reads as fast as is written.
        is_gone: the client has closed its connection.
        on_gone: called when the client closes its connection while its answer is not complete.
        on_writable: called when a client that was too slow has caught up.
    """

    __slots__ = ("_batch", "_cycle", "_transport", "is_gone", "is_writable", "on_gone", "on_writable")

    def __init__(self, cycle: RequestResponseCycle, batch: WriteBatch) -> None:
        self._batch = batch
        self._cycle = cycle
        self._transport = cycle.transport
        self.is_writable = not cycle.flow.write_paused
        self.is_gone = False
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    def open(self, on_writable: Callable[[], None]) -> None:
        """The head has been sent."""
        if not self._cycle.chunked_encoding:
            raise RuntimeError("a direct body needs chunked encoding")
        self.on_writable = on_writable

    def close(self) -> None:
        """Nothing is written here any more; what was written is sent."""
        self.on_writable = None
        self._batch.flush()

    def write(self, data: bytes) -> None:
        """Send some bytes, at least one."""
        batch = self._batch
        if not batch.chunks:
            batch.begin()
        batch.chunks.append((self._transport, data))


def _without_offer(connection: bytes) -> bytes:
    """A Connection header that names no upgrade."""
    return b", ".join(word for word in re.split(rb"\s*,\s*", connection.strip()) if word.lower() not in _OFFER)


def direct_body(scope: Mapping[str, Any]) -> DirectBody | None:
    """A request's direct body; None where another server than ours took it (a test's), and for an answer without a body."""
    return scope.get("extensions", {}).get(BODY_EXTENSION) if scope["method"] != "HEAD" else None


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a request whose head is larger than `max_header_bytes` or has more than `max_header_count` headers; goes on in
    HTTP/1.1 with clients that offer another protocol."""

    max_header_bytes = MAX_HEADER_BYTES
    max_header_count = MAX_HEADER_COUNT
    max_connections: int | None = None
    told_at = -1.0
    error_format = "openai"
    socket_paths: tuple[bytes, ...] = ()
    batch: WriteBatch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_count = 0
        self._too_large = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._bodies: list[DirectBody] = []
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)
        for body in self._bodies:
            body.is_gone, body.is_writable = True, False
            if body.on_gone is not None:
                body.on_gone()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        if self._too_large:
            return
        self._data = data
        super().data_received(data)
        if self._in_head and not self._too_large:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_header_bytes:
                self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._head_count = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_count += 1
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self.max_header_bytes or self._head_count > self.max_header_count:
            self._too_large = True
            raise ValueError("the request's headers are too large")
        super().on_header(name, value)

    def _offers_upgrade(self) -> bool:
        """Whether the client would speak something else from here on, which it can do without (CONNECT could not)."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT" and not self._should_upgrade()

    def _should_upgrade(self) -> bool:
        """Whether the client opens a WebSocket, on a path that has one."""
        is_free = self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]
        return is_free and self.url.partition(b"?")[0].endswith(self.socket_paths) and super()._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """What uvicorn calls when its parser stops behind such a head: the request is read again, without the offer.

        `curl --http2` and Java's client offer HTTP/2 with every first request; what follows is its body all the same.
        """
        error = sys.exception()
        if not isinstance(error, httptools.HttpParserUpgrade) or not self._offers_upgrade():
            return
        rest = self._data[error.args[0] :]
        headers = [(name, _without_offer(value) if name == b"connection" else value) for name, value in self.headers]
        kept = [header for header in headers if header[0] not in _OFFER and header != (b"connection", b"")]
        start = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        head = start + b"".join(b"%s: %s\r\n" % header for header in kept) + b"\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._in_head = False
        self._stop_head_timer()
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            self._refuse_connection(self.max_connections)
            return
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # pyright: ignore[reportUnnecessaryComparison]
            body = DirectBody(self.cycle, self.batch)
            self.scope["extensions"] = {BODY_EXTENSION: body}  # type: ignore[typeddict-item]
            self._bodies.append(body)

    def on_response_complete(self) -> None:
        del self._bodies[:1]
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        for body in self._bodies:
            body.is_writable = False

    def resume_writing(self) -> None:
        super().resume_writing()
        for body in self._bodies:
            body.is_writable = not body.is_gone
            if body.on_writable is not None:
                body.on_writable()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for a head that it cannot parse."""
        if self._too_large:
            self._refuse()
        else:
            self._answer(HTTPError(400, msg, code="invalid_http"))

    def _refuse(self) -> None:
        self._too_large = True
        limits = f"larger than {self.max_header_bytes} bytes or more than {self.max_header_count}"
        message = f"The request's headers are {limits}."
        self._answer(HTTPError(431, message, code="headers_too_large"))

    def _refuse_connection(self, most: int) -> None:
        self._too_large = True
        protocol, now = type(self), time.monotonic()
        if now - protocol.told_at > 1:  # at the limit every client tries again
            protocol.told_at = now
            count = len(self.connections)
            logger.warning("%d connections are open, %d may be (ulimit -n): new ones get a 503.", count, most)
        message = "The server has too many open connections; try again later."
        self._answer(HTTPError(503, message, code="too_many_connections"))

    def _answer(self, error: HTTPError) -> None:
        body = error.body(self.error_format)
        phrase = http.HTTPStatus(error.status).phrase.encode()
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (error.status, phrase, len(body)) + body)
        self.transport.close()


def socket_protocol(*args: Any, **kwargs: Any) -> asyncio.Protocol:
    """What goes on with a connection that becomes a WebSocket; its library is imported for the first."""
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    return WebSocketsSansIOProtocol(*args, **kwargs)


def bounded_to(
    max_header_bytes: int,
    max_header_count: int,
    error_format: str = "openai",
    max_connections: int | None = None,
    socket_paths: Iterable[str] = (),
) -> type[BoundedHttpProtocol]:
    """One server's protocol. Requests on more than `max_connections` are answered with a 503; `socket_paths` have WebSockets."""
    bounds: dict[str, Any] = {"max_header_bytes": max_header_bytes, "max_header_count": max_header_count}
    bounds["socket_paths"] = tuple(path.encode() for path in socket_paths)
    bounds["error_format"], bounds["max_connections"] = error_format, max_connections
    return type("Protocol", (BoundedHttpProtocol,), {**bounds, "batch": WriteBatch()})
