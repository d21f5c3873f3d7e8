"""The middleware before every route, as plain ASGI: request ids, keys, counting what runs, answering errors.

Knows paths and headers. Knows nothing of bodies.
"""

import asyncio
import dataclasses
import importlib
import inspect
import re
import time
import uuid
from collections.abc import Callable, Container, Iterable
from typing import Any, cast

import msgspec
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.caller import CALLER, Caller, check_timeout
from quire.entrypoints.http.api_keys import KeyRing
from quire.entrypoints.http.errors import OVER_CAPACITY, HTTPError, not_ready
from quire.entrypoints.http.http_protocol import BODY_EXTENSION
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.http.streaming import ClientGone, failure_of
from quire.errors import ConfigError, refusing
from quire.logger import init_logger
from quire.metrics.spans import TRACE_HEADERS

logger = init_logger(__name__)

OPEN_PATHS = ("/health", "/live")
"""Reached without a key: a load balancer or a supervisor has none."""
PROBED_PATHS = frozenset({"/ready", "/ping", "/metrics"})
"""What probes and monitors ask: reached without a key, unless the operator guards them (`--api-key-for all`)."""

TRACE_NAMES = (b"traceparent", b"tracestate")
"""Headers in which a client names the trace that its request belongs to."""

KEY_PROTOCOL = "openai-insecure-api-key."

MAX_TENANT_CHARS = 64
"""Characters of a tenant that a header names; the rest does not count."""

_CONTROLS = bytes(byte if 0x20 <= byte < 0x7F else 0x3F for byte in range(256))

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _header_text(text: str) -> bytes:
    """A text as a header's value: visible ASCII and spaces; the rest as escapes."""
    return text.encode("ascii", "backslashreplace").translate(_CONTROLS)


def route_path(scope: Scope) -> str:
    """The path below the root path that a proxy strips."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root) else path


async def send_error(error: HTTPError, scope: Scope, send: Send) -> None:
    """Answer with an error, as the clients of the route expect it."""
    scope["state"]["error"] = error
    body = scope["state"]["error_body"](error, route_path(scope))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _answering(send: Send) -> Send:
    """What a WebSocket's client is sent before it is open may be an answer as to any request (an extension of ASGI)."""

    async def answer(message: Message) -> None:
        is_answer = message["type"].startswith("http.")
        await send({**message, "type": f"websocket.{message['type']}"} if is_answer else message)

    return answer


def logged_error(error: Exception, request_id: str, settings: ServerSettings) -> HTTPError:
    """As `failure_of`; the log gets the cause of a refusal too, if the operator asks."""
    answer = failure_of(error, request_id)
    if settings.log_error_stack and answer.status < 500:
        logger.info("Request %s was answered with %d.", request_id, answer.status, exc_info=error)
    return answer


class RequestContext:
    """Outermost: gives each request an id (the client's `X-Request-Id`, or a new one), returns it, counts the request, and
    answers what other middleware raises.

    Args:
        work_paths: the routes whose requests a draining server waits for.
        error_body: an error as JSON for the clients of a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        work_paths: Container[str],
        error_body: Callable[[HTTPError, str], bytes],
    ) -> None:
        self._app = app
        self._state = state
        self._work_paths = work_paths
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            scope["method"], send = "GET", _answering(send)
        request_id = self._request_id(scope)
        kept = scope.setdefault("state", {})
        kept["request_id"], kept["error_body"] = request_id, self._error_body
        started = complete = False
        status, began = 0, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal started, complete, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                message["headers"] = [*message.get("headers", ()), *self._headers(scope)]
            elif message["type"] == "websocket.accept":
                started, complete, status = True, True, 101
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        trace = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in TRACE_NAMES}
        token = TRACE_HEADERS.set(trace) if trace else None
        try:
            await self._run(scope, receive, send_with_id)
        except ClientGone:
            return
        except asyncio.CancelledError:
            if not self._state.forced:
                raise
            if not started:
                await send_error(not_ready("The server was stopped."), scope, send_with_id)
            elif not complete:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:
            answer = logged_error(error, request_id, self._state.settings)
            if not started:
                await send_error(answer, scope, send_with_id)
        finally:
            if token is not None:
                TRACE_HEADERS.reset(token)
            self._state.http.record(route_path(scope), scope["method"], status, time.perf_counter() - began)

    def _caller(self, scope: Scope) -> Caller:
        """Whose request it is, as far as its headers say. Raises HTTPError, a 400: the timeout is no number of seconds."""
        wanted = self._state.settings.tenant_header
        tenant = _header(scope, wanted.lower().encode()) if wanted else None
        is_batch_line = bool(scope["state"].get("is_batch_line"))
        caller = Caller((tenant or b"").decode("latin-1")[:MAX_TENANT_CHARS], is_background=is_batch_line)
        if (copy := _header(scope, b"x-data-parallel-rank")) is not None:
            if not copy.isdigit():
                message = f"X-data-parallel-rank: {copy.decode('latin-1')[:40]!r} is not the number of a copy."
                raise HTTPError(400, message, param="X-data-parallel-rank")
            caller = dataclasses.replace(caller, copy=int(copy))
        timeout = _header(scope, b"x-request-timeout")
        if timeout is None:
            return caller
        try:
            return caller.until(time.monotonic() + check_timeout(float(timeout)))
        except ValueError:
            message = f"X-Request-Timeout: {timeout.decode('latin-1')[:40]!r} is not a number of seconds above 0."
            raise HTTPError(400, message, param="X-Request-Timeout") from None

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """What every answer has: the request's id; and, if there are any, warnings and a report of the load."""
        kept = scope["state"]
        headers = [(b"x-request-id", kept["request_id"].encode()), *self._load_report(scope)]
        if warnings := kept.get("warnings"):
            headers.append((b"quire-warnings", _header_text("; ".join(warnings))))
        return headers

    def _load_report(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The header that tells a load balancer how busy the engine is, as ORCA has it, where the request asks for it."""
        wanted = (_header(scope, b"endpoint-load-metrics-format") or b"").lower()
        engine = self._state.engine_or_none
        if wanted not in (b"text", b"json") or engine is None:
            return []
        figures = {
            "kv_cache_usage_perc": engine.metrics.kv_cache_usage,
            "num_requests_waiting": engine.metrics.num_waiting,
        }
        if wanted == b"json":
            return [(b"endpoint-load-metrics", b"JSON " + msgspec.json.encode({"named_metrics": figures}))]
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())
        return [(b"endpoint-load-metrics", b"TEXT " + text.encode())]

    @staticmethod
    def _request_id(scope: Scope) -> str:
        given = _header(scope, b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given.decode("ascii")
        return uuid.uuid4().hex

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._caller(scope)
        scope["state"]["tenant"] = caller.tenant
        token = CALLER.set(caller)  # what later layers find out is forgotten with the request
        try:
            await self._run_for_caller(scope, receive, send)
        finally:
            CALLER.reset(token)

    async def _run_for_caller(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) not in self._work_paths or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        self._state.begin_request()
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.end_request()
            self._note_refusal(scope["state"])

    def _note_refusal(self, kept: dict[str, Any]) -> None:
        """Count a request for which there was no room. A line of a batch waits for room by itself."""
        error: HTTPError | None = kept.get("error")
        if kept.get("is_batch_line") or error is None or error.code != OVER_CAPACITY:
            return
        if self._state.engine_or_none is not None:
            self._state.engine_or_none.metrics.record_refusal(str(error), kept.get("tenant", ""))


def _offered_key(scope: Scope) -> bytes | None:
    """Pages in browsers, which choose no headers for a WebSocket, have it in the name of a protocol."""
    scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    named = [name for name in scope.get("subprotocols", ()) if name.startswith(KEY_PROTOCOL)]
    return named[0].removeprefix(KEY_PROTOCOL).encode() if named else _header(scope, b"x-api-key")


class Authentication:
    """Every route needs `Authorization: Bearer KEY` (or `X-Api-Key: KEY`, as Anthropic's clients send), but for
    `OPEN_PATHS` and `open_paths`.

    The key's name is the caller's tenant, and the tenant that a header names is a part of it.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Iterable[str] = ()) -> None:
        self._app = app
        self._open_paths = frozenset((*OPEN_PATHS, *open_paths))
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = (
            scope["type"] != "lifespan" and scope["method"] != "OPTIONS" and route_path(scope) not in self._open_paths
        )
        key = self._keys.find(_offered_key(scope)) if guarded else None
        if guarded and key is None:
            headers = {"www-authenticate": "Bearer"}
            message = "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
            await send_error(HTTPError(401, message, code="invalid_api_key", headers=headers), scope, send)
            return
        if key is not None:
            caller = CALLER.get()
            tenant = f"{key.name}/{caller.tenant}" if caller.tenant else key.name
            scope["state"]["tenant"] = tenant
            CALLER.set(dataclasses.replace(caller, tenant=tenant, weight=key.weight))
        await self._app(scope, receive, send)


class ErrorAnswers:
    """Innermost: answers what a route raises, so that the answer passes through all other middleware.

    Args:
        allows_direct: a stream may be written straight to the connection, past the other middleware.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, allows_direct: bool) -> None:
        self._app = app
        self._settings = settings
        self._allows_direct = allows_direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._allows_direct:
            scope.get("extensions", {}).pop(BODY_EXTENSION, None)
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if started or isinstance(error, ClientGone):
                raise
            await send_error(logged_error(error, scope["state"]["request_id"], self._settings), scope, send)


def named_middleware(path: str) -> Middleware:
    """The operator's own: an ASGI class, or a coroutine function of (request, call_next).
    Raises ConfigError if nothing of that kind has this name."""
    module, _, name = path.rpartition(".")
    with refusing(
        ImportError, AttributeError, ValueError, setting="middleware", what=f"middleware: {path!r} cannot be imported"
    ):
        found: Any = getattr(importlib.import_module(module), name)
    if inspect.isclass(found):
        return Middleware(cast("Any", found))
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError.of("middleware", f"{path!r} must be an ASGI class, or an async function of (request, call_next)")
