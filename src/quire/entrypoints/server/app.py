"""The ASGI application: routes, what stands before them, and errors in the protocol's shape."""

from collections.abc import Sequence

from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire import envs
from quire.entrypoints.anthropic.protocol import error_body
from quire.entrypoints.console.routes import build_console_routes, build_docs_routes
from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.middleware import (
    PROBED_PATHS,
    Authentication,
    BehindOthers,
    RequestContext,
    logged_error,
    route_path,
)
from quire.entrypoints.http.openapi import build_openapi
from quire.entrypoints.http.route_tools import Endpoint, Handler, build_routes, json_response
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.server.operations import DEV_ROUTES, OPERATIONS
from quire.entrypoints.server.routes import WORK
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
) -> "Application":
    """An application around `state`; the engine may be set later."""
    state.http.watch([endpoint.path for endpoint in (*WORK, *OPERATIONS)])
    pages = (*(build_console_routes() if console else ()), *(build_docs_routes() if docs else ()))
    middleware = [
        Middleware(RequestContext, state=state, work_paths={endpoint.path for endpoint in WORK}),
        *extra_middleware,
    ]
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
    endpoints = [*WORK, *OPERATIONS, *(DEV_ROUTES if envs.QUIRE_SERVER_DEV_MODE else ())]
    routes = [*build_routes(endpoints), *pages]
    if docs:
        routes.append(Route("/openapi.json", _document(endpoints), methods=["GET"]))
    return Application(state, routes, middleware, root_path)


class Application:
    """ASGI: the middleware, and behind it the routes.

    Requests for work are found by their path and go straight to their handlers: Starlette's own layers and routing would cost
    each of them more than all that is ours. What these raise is answered by `RequestContext`.

    Attributes:
        routes: all of them.
        state: `state.server` is the server's; routes and middleware find it as `request.app.state.server`.
    """

    def __init__(
        self, state: ServerState, routes: Sequence[Route], middleware: Sequence[Middleware], root_path: str
    ) -> None:
        self.routes = routes
        self.state = State({"server": state})
        handlers = {HTTPException: _protocol_error, HTTPError: _raised_error, QuireError: _raised_error}
        self._others = ExceptionMiddleware(Router(routes, redirect_slashes=False), handlers)
        self._work = {endpoint.path: endpoint.handler for endpoint in WORK}
        self._root_path = root_path
        self._app: ASGIApp = self._route
        for layer in reversed(middleware):
            self._app = layer.cls(self._app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if self._root_path:
            scope["root_path"] = self._root_path
        await self._app(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and (work := self._work.get(route_path(scope))):
            response = await work(Request(scope, receive, send))
            await response(scope, receive, send)
        else:
            await self._others(scope, receive, send)


def _document(endpoints: Sequence[Endpoint]) -> Handler:
    document = build_openapi(endpoints)

    async def handler(request: Request) -> Response:
        root_path = request.scope.get("root_path", "")
        return json_response(document | ({"servers": [{"url": root_path}]} if root_path else {}))

    return handler


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
    paths = [route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path]
    return did_you_mean(route_path(request.scope)[:200].rstrip("/"), paths, "; {}", ".", cutoff=0.7)


def _allowed(error: HTTPException) -> str:
    methods = (error.headers or {}).get("Allow")
    return f"; allowed: {methods}" if methods else ""
