"""`quire serve --models FILE`: one server for several models, each in a process of its own, awake while it is used.

This process has the port, and keys and origins to check; it knows no model. A signal lets running requests finish.
"""

import argparse
import asyncio
import signal
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from quire.entrypoints.openai.cli_args import add_server_arguments, flatten, serve_words
from quire.errors import ConfigError
from quire.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import uvicorn
    from starlette.types import ASGIApp, Lifespan

    from quire.entrypoints.http.api_keys import KeyEntry
    from quire.entrypoints.http.listen import ListenOptions
    from quire.entrypoints.http.state import ServerSettings
    from quire.entrypoints.several.host import ModelHost

logger = init_logger(__name__)
_FRONTS = (
    *("host", "port", "uds", "root_path", "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh", "models"),
)
"""Flags of the port, which the models' own servers do not get."""


def serve_several(
    args: argparse.Namespace, options: "ListenOptions", keys: "Sequence[KeyEntry]", settings: "ServerSettings"
) -> None:
    """Serve until a signal ends it. Raises ConfigError: the file is wrong, or a flag is not for several models."""
    from quire.entrypoints.http.listen import open_socket
    from quire.entrypoints.several.host import ModelHost
    from quire.entrypoints.several.models_file import read_models_file

    _check(args)
    file = read_models_file(args.models)
    listener, options = open_socket(options)
    host = ModelHost(file, models_words(args.command_line), keys[0].key if keys else None)
    began = time.monotonic()

    async def begin() -> None:
        await host.start()
        _announce(args, host, options, bool(keys), time.monotonic() - began)

    @asynccontextmanager
    async def living(app: object) -> "AsyncGenerator[None]":
        """Wakes models when the server starts, and ends them when it has ended."""
        beginning = asyncio.ensure_future(begin())
        try:
            yield
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)
            await host.close()

    with listener, asyncio.Runner() as runner:
        runner.run(_serve(_config(_app(args, host, keys, settings, living), options), listener))


def _check(args: argparse.Namespace) -> None:
    if args.model_tag is not None or args.api_server_count > 1:
        raise ConfigError.of(
            "models", "the file names the models, each with one server: leave MODEL and --api-server-count out."
        )
    for name in ("handover", "responses_store", "batch_store"):
        if getattr(args, name) is not None:
            raise ConfigError.of(name, "it is for one model: give it among the flags of a model in the file.")


def models_words(words: list[str]) -> list[str]:
    """The flags that each model's server gets: all but those of the port."""
    return serve_words(words, _add_ports)


def _add_ports(parser: argparse.ArgumentParser) -> None:
    server = argparse.ArgumentParser(add_help=False)
    add_server_arguments(server)
    for action in server._actions:
        if action.dest in _FRONTS:
            parser._add_action(action)


def _app(
    args: argparse.Namespace,
    host: "ModelHost",
    keys: "Sequence[KeyEntry]",
    settings: "ServerSettings",
    living: "Lifespan[Any]",
) -> "ASGIApp":
    from quire.entrypoints.http.middleware import named_middleware
    from quire.entrypoints.http.route_tools import build_routes
    from quire.entrypoints.http.state import ServerState
    from quire.entrypoints.server.app import Application, build_middleware
    from quire.entrypoints.server.routes import WORK
    from quire.entrypoints.several.front import Front, front_endpoints

    state, work = ServerState(settings), [endpoint.path for endpoint in WORK]
    endpoints = front_endpoints(Front(host), work)
    origins = {
        "allow_origins": flatten(args.allowed_origins),
        "allow_methods": flatten(args.allowed_methods),
        "allow_headers": flatten(args.allowed_headers),
        "allow_credentials": args.allow_credentials,
    }
    extra = [named_middleware(path) for path in args.middleware]
    middleware = build_middleware(state, set(work), frozenset(), keys, origins, extra)
    handlers = {endpoint.path: endpoint.handler for endpoint in endpoints if endpoint.path in work}
    return Application(
        state, build_routes(endpoints), middleware, args.root_path.rstrip("/"), handlers, lifespan=living
    )


async def _serve(config: "uvicorn.Config", listener: socket.socket) -> None:
    """Until SIGTERM, which lets requests finish, or SIGINT, which does not."""
    from quire.entrypoints.server.process import QuietServer

    server, loop = QuietServer(config), asyncio.get_running_loop()

    def end(at_once: bool) -> None:
        server.force_exit = server.force_exit or at_once or server.should_exit
        server.stop()

    loop.add_signal_handler(signal.SIGTERM, end, False)
    loop.add_signal_handler(signal.SIGINT, end, True)
    await server.serve(sockets=[listener])


def _config(app: "ASGIApp", options: "ListenOptions") -> "uvicorn.Config":
    import uvicorn

    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=int(options.shutdown_timeout_s),
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        ssl_ciphers=options.ssl_ciphers,
    )


def _announce(
    args: argparse.Namespace, host: "ModelHost", options: "ListenOptions", has_keys: bool, seconds: float
) -> None:
    """Say where the server is; `quire ps` lists it from now on."""
    from quire.entrypoints.cli.running import register

    names = [name for model in host.models for name in model.entry.names]
    register(options.url, args.models, names, has_keys, is_several=True)
    shown = ", ".join(model.name for model in host.models)
    print(f"\nThe server of {shown} is ready after {seconds:.1f} s at {options.url}", flush=True)
