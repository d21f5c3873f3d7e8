"""The ASGI application: the routes and the middleware before them; also routes of plugins (group `quire.endpoints`), which load
only if `QUIRE_PLUGINS` names them.

A plugin's entry point names a function that is given the server's state and returns `Endpoint`s. They stand behind the same keys
and middleware as all others. A plugin that fails, or wants a path that is taken, is named in the log and left out.
"""

import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from starlette.websockets import WebSocket

from quire import envs
from quire.entrypoints.anthropic.protocol import anthropic_error, speaks_anthropic
from quire.entrypoints.batches.service import Batches
from quire.entrypoints.console.routes import build_console_routes, build_docs_routes
from quire.entrypoints.http.api_keys import KeyEntry, KeyRing
from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.middleware import (
    PROBED_PATHS,
    Authentication,
    ErrorAnswers,
    RequestContext,
    route_path,
)
from quire.entrypoints.http.openapi import build_openapi
from quire.entrypoints.http.route_tools import Endpoint, Handler, build_routes, json_response
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.ollama.protocol import ollama_error, speaks_ollama
from quire.entrypoints.realtime.routes import REALTIME, SOCKETS
from quire.entrypoints.responses.store import ResponseStore
from quire.entrypoints.server.operations import CLOSED_PATHS, DEV_ROUTES, OPERATIONS
from quire.entrypoints.server.routes import WORK
from quire.errors import ConfigError, did_you_mean
from quire.logger import init_logger
from quire.plugins import ENDPOINTS_GROUP, find_plugins, load

logger = init_logger(__name__)


def plugin_endpoints(state: ServerState, own: Sequence[Endpoint]) -> list[Endpoint]:
    """The routes of the plugins; `own`: the server's."""
    owners = dict.fromkeys((endpoint.path for endpoint in own), "quire")
    added: list[Endpoint] = []
    for name, plugin in find_plugins(ENDPOINTS_GROUP).items():
        try:
            endpoints: Sequence[Endpoint] = list(load(plugin)(state))
            _check(endpoints, owners)
        except Exception as error:  # a plugin's code: whatever it raises, the server starts
            plugin.fail(error)
            logger.exception("The endpoints of plugin %r cannot be added and are left out", name)
            continue
        owners |= dict.fromkeys((endpoint.path for endpoint in endpoints), plugin.owner)
        added += endpoints
    return added


def _check(endpoints: Sequence[Endpoint], owners: dict[str, str]) -> None:
    for endpoint in endpoints:
        if not isinstance(endpoint, Endpoint):
            raise ConfigError(f"{endpoint!r} is not a quire.entrypoints.http.route_tools.Endpoint")
        if endpoint.path in owners:
            raise ConfigError(f"the route {endpoint.path!r} belongs to {owners[endpoint.path]!r} already")


def build_app(
    state: ServerState,
    *,
    api_keys: Sequence[str | KeyEntry] = (),
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
    state.responses = ResponseStore(state.settings.responses_store)
    own = [*WORK, *OPERATIONS, *REALTIME, *(DEV_ROUTES if envs.QUIRE_SERVER_DEV_MODE else ())]
    endpoints = [*own, *plugin_endpoints(state, own)]
    state.http.watch([endpoint.path for endpoint in endpoints])
    pages = (*(build_console_routes() if console else ()), *(build_docs_routes() if docs else ()))
    work_paths = {endpoint.path for endpoint in WORK}
    if state.settings.batch_store is not None:
        key = KeyEntry.of(api_keys[0]).key if api_keys else None
        state.batches = Batches(state.settings.batch_store, work_paths, CLOSED_PATHS, key)
    origins: dict[str, Any] = {"allow_methods": allowed_methods, "allow_headers": allowed_headers}
    origins |= {"allow_origins": allowed_origins, "allow_credentials": allow_credentials}
    page_paths = frozenset(route.path for route in pages)
    middleware = build_middleware(state, work_paths, page_paths, api_keys, origins, extra_middleware)
    routes = [*build_routes(endpoints), *SOCKETS, *pages]
    if docs:
        routes.append(Route("/openapi.json", _document(endpoints), methods=["GET"]))
    work = {endpoint.path: endpoint.handler for endpoint in WORK}
    return Application(state, routes, middleware, root_path, work, allowed_origins)


def build_middleware(
    state: ServerState,
    work_paths: Set[str],
    page_paths: frozenset[str],
    api_keys: Sequence[str | KeyEntry],
    origins: dict[str, Any],
    extra: Sequence[Middleware],
) -> list[Middleware]:
    """What every request passes through, outermost first.

    Args:
        page_paths: need no key.
        origins: the options of `CORSMiddleware`; without `allow_origins` there is none.
        extra: the operator's own.
    """
    write_error = functools.partial(_error_body, error_format=state.settings.error_format)
    middleware = [Middleware(RequestContext, state=state, work_paths=work_paths, error_body=write_error), *extra]
    if origins.get("allow_origins"):
        middleware.append(Middleware(CORSMiddleware, **origins))
    if api_keys:
        open_paths = page_paths if state.settings.api_key_for == "all" else page_paths | PROBED_PATHS
        middleware.append(Middleware(Authentication, keys=KeyRing(api_keys), open_paths=open_paths))
    middleware.append(Middleware(ErrorAnswers, settings=state.settings, allows_direct=not extra))
    return middleware


class Application:
    """ASGI: the middleware, and behind it the routes.

    Requests for work are found by their path and go straight to their handlers: Starlette's own layers and routing would cost
    each of them more than all that is ours.

    Args:
        work: handlers of posts that are found by their path alone.
        origins: whose pages may open WebSockets, besides this server's own.
        lifespan: lasts as long as the server.

    Attributes:
        routes: all of them.
        state: `state.server` is the server's; routes and middleware find it as `request.app.state.server`.
    """

    def __init__(
        self,
        state: ServerState,
        routes: Sequence[BaseRoute],
        middleware: Sequence[Middleware],
        root_path: str,
        work: Mapping[str, Handler],
        origins: Sequence[str] = (),
        lifespan: Lifespan[Any] | None = None,
    ) -> None:
        self.routes = routes
        self.state = State({"server": state})
        self._router = Router(routes, redirect_slashes=False, lifespan=lifespan)
        self._work = work
        self._origins = origins
        self._root_path = root_path
        self._app: ASGIApp = self._route
        for layer in reversed(middleware):
            self._app = layer.cls(self._app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if self._root_path:
            scope["root_path"] = self._root_path
        await (self._router if scope["type"] == "lifespan" else self._app)(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open_socket(WebSocket(scope, receive, send))
            return
        if scope.get("method") == "POST" and (work := self._work.get(route_path(scope))):
            response = await work(Request(scope, receive, send))
            await response(scope, receive, send)
            return
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            raise _refusal(Request(scope), error) from None

    async def _open_socket(self, socket: WebSocket) -> None:
        """Browsers let any page open a WebSocket to any server: it is the server that must look whose page it is."""
        origin = socket.headers.get("origin")
        if origin and urlsplit(origin).netloc != socket.headers.get("host") and not {origin, "*"} & {*self._origins}:
            raise HTTPError(
                403, f"Pages of {origin[:200]!r} may not connect (--allowed-origins).", code="origin_refused"
            )
        await self._router(socket.scope, socket.receive, socket.send)


def _error_body(error: HTTPError, path: str, error_format: str) -> bytes:
    """The JSON that a client of `path` gets; where no protocol has a form of its own, in `error_format`."""
    if speaks_anthropic(path):
        return anthropic_error(error)
    return ollama_error(error) if speaks_ollama(path) else error.body(error_format)


def _document(endpoints: Sequence[Endpoint]) -> Handler:
    document = build_openapi(endpoints)

    async def handler(request: Request) -> Response:
        root_path = request.scope.get("root_path", "")
        return json_response(document | ({"servers": [{"url": root_path}]} if root_path else {}))

    return handler


def _refusal(request: Request, error: HTTPException) -> HTTPError:
    """Starlette's own refusals (no such route, wrong method) in the words of this server."""
    headers = dict(error.headers or {})
    if error.status_code == 404:
        message = f"There is no route {request.url.path[:200]!r} here{_near_route(request)}"
        return HTTPError(404, message, code="route_not_found", headers=headers)
    allowed = f"; allowed: {headers['Allow']}" if "Allow" in headers else ""
    message = f"{request.method} is not allowed on {request.url.path[:200]!r}{allowed}."
    return HTTPError(405, message, code="method_not_allowed", headers=headers)


def _near_route(request: Request) -> str:
    """Which route may have been meant."""
    paths = [route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path]
    return did_you_mean(route_path(request.scope)[:200].rstrip("/"), paths, "; {}", ".", cutoff=0.7)
