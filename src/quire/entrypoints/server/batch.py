"""Lines of OpenAI's batch files, answered by the server's own routes in this process.

`answer_lines` runs any number of lines together and gives their results in the order of the lines. `call_app` calls the server's
application: a request in, a whole answer out, no socket between. Knows nothing of files.
"""

import asyncio
import collections
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Scope

from quire.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from quire.entrypoints.http.state import ServerState

WINDOW = 16
"""Results that may wait to be written, as a multiple of the requests in flight."""
RETRY_S = 0.2
"""Until a line is tried again that found the queue full."""
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class BatchRequest(msgspec.Struct, kw_only=True):
    """A line of the input."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a line has no good answer."""

    code: str
    message: str


class BatchResponse(msgspec.Struct):
    """What the route answered; `body` is its JSON as it came."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct):
    """A line of the output. A refusal of a route is in `response` and in `error`."""

    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid.uuid4().hex}")
    custom_id: str | None = None
    response: BatchResponse | None = None
    error: BatchError | None = None

    def as_line(self) -> bytes:
        """This result as JSON on one line, whatever white space the body has."""
        line = msgspec.json.encode(self)
        if b"\n" in line:
            line = msgspec.json.encode(msgspec.json.decode(line))
        return line + b"\n"


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Refusal(msgspec.Struct):
    error: dict[str, Any] = {}


class _Modes(msgspec.Struct):
    stream: Any = None
    background: Any = None


_decode = msgspec.json.Decoder(BatchRequest).decode
_decode_named = msgspec.json.Decoder(_Named).decode


def custom_id_of(line: bytes) -> str | None:
    """The name of a line of the input or the output; None where it has none that can be read."""
    with contextlib.suppress(*MALFORMED):
        return _decode_named(line).custom_id
    return None


class LineAnswerer:
    """Answers a line by the server's application.

    Args:
        app: the application around `state`.
    """

    def __init__(self, app: ASGIApp, state: "ServerState") -> None:
        from quire.entrypoints.server.operations import OPERATIONS

        self._app = app
        self._state = state
        self._closed = {endpoint.path for endpoint in OPERATIONS}
        self._seen: set[str] = set()
        self._running = 0

    def skip(self, line: bytes) -> None:
        """A line that was answered by an earlier run."""
        with contextlib.suppress(*MALFORMED):
            self._check(_decode(line))

    async def answer(self, line: bytes) -> BatchResult:
        """The line's result. Raises EngineDeadError: the engine has died; no further line can be answered."""
        try:
            request = _decode(line)
        except MALFORMED as error:
            fault = BatchError("invalid_line", f"This line is not a batch request: {error}.")
            return BatchResult(custom_id=custom_id_of(line), error=fault)
        if fault := self._check(request):
            return BatchResult(custom_id=request.custom_id, error=fault)
        self._running += 1
        try:
            return await self._ask(request)
        finally:
            self._running -= 1

    def _check(self, request: BatchRequest) -> BatchError | None:
        """Why a request cannot be given to its route."""
        if request.method != "POST":
            return BatchError("invalid_method", f"method: {request.method[:50]!r} is not 'POST'.")
        if request.custom_id in self._seen:
            text = f"custom_id: {request.custom_id[:200]!r} is on an earlier line too."
            return BatchError("duplicate_custom_id", text)
        self._seen.add(request.custom_id)
        if request.url.partition("?")[0] in self._closed:
            text = f"url: {request.url[:200]!r} is an operator's route, not one for requests."
            return BatchError("invalid_url", text)
        with contextlib.suppress(*MALFORMED):
            modes = msgspec.json.decode(request.body, type=_Modes)
            if modes.stream or modes.background:
                field = "stream" if modes.stream else "background"
                return BatchError("invalid_request", f"{field}: a batch file's answers are whole.")
        return None

    async def _ask(self, request: BatchRequest) -> BatchResult:
        while True:
            answer = await call_app(self._app, "POST", request.url, bytes(request.body))
            if answer.status >= 500 and self._state.engine.errored:
                raise EngineDeadError("The engine has died; --resume goes on after the lines that are written.")
            if answer.status != 429 or self._running < 2:
                break
            await asyncio.sleep(RETRY_S)  # others are in the queue, and leave it
        body, error = answer.body, None
        if answer.status >= 400:
            detail: dict[str, Any] = {}
            with contextlib.suppress(*MALFORMED):
                detail = msgspec.json.decode(body, type=_Refusal).error
            message = str(detail.get("message") or f"status {answer.status}")
            error = BatchError(str(detail.get("code") or answer.status), message)
        if not body.startswith((b"{", b"[")):
            body = msgspec.json.encode({"text": body.decode("utf-8", "replace")})
        response = BatchResponse(answer.status, answer.headers.get("x-request-id", ""), msgspec.Raw(body))
        return BatchResult(custom_id=request.custom_id, response=response, error=error)


async def answer_lines(
    lines: Iterable[bytes],
    answer: Callable[[bytes], Awaitable[BatchResult]],
    write: Callable[[BatchResult], None],
    max_inflight: int,
) -> None:
    """Give every line to `answer`, at most `max_inflight` at a time, and its result to `write`, in the order of the lines.
    Raises what `answer` raises; the lines in flight are cancelled."""
    running = asyncio.Semaphore(max_inflight)

    async def work(line: bytes) -> BatchResult:
        try:
            return await answer(line)
        finally:
            running.release()

    waiting: collections.deque[asyncio.Task[BatchResult]] = collections.deque()
    try:
        for line in lines:
            await running.acquire()
            waiting.append(asyncio.create_task(work(line)))
            while waiting and (waiting[0].done() or len(waiting) >= WINDOW * max_inflight):
                write(await waiting[0])
                waiting.popleft()
        while waiting:
            write(await waiting[0])
            waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class Answer(NamedTuple):
    """What the application answered."""

    status: int
    headers: dict[str, str]
    body: bytes


async def call_app(app: ASGIApp, method: str, path: str, body: bytes = b"") -> Answer:
    """One request; its whole body is there at once, and its client never leaves."""
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
