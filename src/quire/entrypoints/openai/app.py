"""The ASGI application: routes, what stands before them, and errors in the protocol's shape."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.entrypoints.anthropic.protocol import error_body
from quire.entrypoints.console.routes import build_console_routes, build_docs_routes
from quire.entrypoints.openai.errors import HTTPError
from quire.entrypoints.openai.middleware import (
    PROBED_PATHS,
    Authentication,
    BehindOthers,
    RequestContext,
    logged_error,
    route_path,
)
from quire.entrypoints.openai.openapi import build_openapi
from quire.entrypoints.openai.operations import OPERATIONS
from quire.entrypoints.openai.routes import WORK, build_routes
from quire.entrypoints.openai.state import ServerState
from quire.errors import QuireError, did_you_mean
from quire.logger import init_logger

logger = init_logger(__name__)


def build_app(
    state: ServerState,
    *,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    allowed_methods: Sequence[str] = ("*",),
    allowed_headers: Sequence[str] = ("*",),
    allow_credentials: bool = False,
    root_path: str = "",
    extra_middleware: Sequence[Middleware] = (),
    docs: bool = True,
    console: bool = True,
) -> FastAPI:
    """An application around `state`; the engine may be set later."""
    pages = (*(build_console_routes() if console else ()), *(build_docs_routes() if docs else ()))
    middleware = [Middleware(RequestContext, state=state, work_paths=WORK), *extra_middleware]
    if extra_middleware:
        middleware.append(Middleware(BehindOthers, settings=state.settings))
    if allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(allowed_origins),
                allow_methods=list(allowed_methods),
                allow_headers=list(allowed_headers),
                allow_credentials=allow_credentials,
            )
        )
    if api_keys:
        paths = frozenset(route.path for route in pages)
        open_paths = paths if state.settings.api_key_for == "all" else paths | PROBED_PATHS
        middleware.append(Middleware(Authentication, keys=tuple(api_keys), open_paths=open_paths))
    app = _App(
        title="Quire",
        middleware=middleware,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if docs else None,
        exception_handlers={HTTPException: _protocol_error, HTTPError: _raised_error, QuireError: _raised_error},
    )
    app.root_path = root_path
    app.state.server = state
    state.http.watch([*WORK, *(path for path, _, _ in OPERATIONS)])
    app.router.routes.extend([*build_routes(), *pages])
    app.router.redirect_slashes = False
    document = build_openapi()

    def openapi() -> dict[str, Any]:
        return document

    app.openapi = openapi
    app.prepare_work(middleware)
    return app


class _App(FastAPI):
    """Requests for work go straight to their handlers: FastAPI's own layers and routing cost more than all that is ours, and
    what they are for (validation, error pages, telemetry) is done elsewhere here."""

    def prepare_work(self, middleware: Sequence[Middleware]) -> None:
        """Have what stands before every route stand before these too."""
        self._work: ASGIApp = _work
        for layer in reversed(middleware):
            self._work = layer.cls(self._work, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.root_path:
            scope["root_path"] = self.root_path
        if scope["type"] == "http" and scope["method"] == "POST" and route_path(scope) in WORK:
            scope["app"] = self
            await self._work(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


async def _work(scope: Scope, receive: Receive, send: Send) -> None:
    """One request for work. What it raises is answered by `RequestContext`."""
    response = await WORK[route_path(scope)](Request(scope, receive, send))
    await response(scope, receive, send)


def _answer(request: Request, error: HTTPError) -> Response:
    body = error_body(error, route_path(request.scope), request.scope["state"]["error_format"])
    return Response(body, status_code=error.status, headers=error.headers, media_type="application/json")


async def _raised_error(request: Request, error: Exception) -> Response:
    """What a route raised on purpose."""
    state: ServerState = request.app.state.server
    return _answer(request, logged_error(error, str(request.scope["state"]["request_id"]), state.settings))


async def _protocol_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"There is no route {request.url.path[:200]!r} here{_near_route(request)}",
        405: f"{request.method} is not allowed on {request.url.path[:200]!r}{_allowed(error)}.",
    }.get(error.status_code, str(error.detail))
    code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code)
    status = 400 if error.status_code == 422 else error.status_code
    return _answer(request, HTTPError(status, message, code=code, headers=dict(error.headers or {})))


def _near_route(request: Request) -> str:
    """Which route may have been meant."""
    paths = [route.path for route in request.app.router.routes if isinstance(route, Route) and "{" not in route.path]
    return did_you_mean(route_path(request.scope)[:200].rstrip("/"), paths, "; {}", ".", cutoff=0.7)


def _allowed(error: HTTPException) -> str:
    methods = (error.headers or {}).get("Allow")
    return f"; allowed: {methods}" if methods else ""
