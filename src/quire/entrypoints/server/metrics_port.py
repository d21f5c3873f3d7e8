"""`GET /metrics` on a port of its own, for a process that is no server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from quire.entrypoints.http.listen import ListenOptions, open_socket
from quire.entrypoints.server.process import QuietServer


@contextlib.asynccontextmanager
async def metrics_port(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """Answer `GET /metrics` while this context lasts; gives the port (0 takes any that is free).
    Raises ConfigError: the port cannot be opened."""
    listener, options = open_socket(ListenOptions(host, port))
    routes = Router([Route("/metrics", app, methods=["GET"])])
    server = QuietServer(uvicorn.Config(routes, lifespan="off", log_config=None, access_log=False))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield options.port
    finally:
        server.stop()
        await serving
