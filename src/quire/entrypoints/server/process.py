"""The server process: the socket, the event loop, signals, and the order in which things start and end.

The port is open before the engine is loaded, so that a health check gets an answer (503) and not a refusal. SIGTERM drains;
SIGINT, or a second signal, ends at once.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import uvicorn
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from quire import envs
from quire.descriptors import raise_limit
from quire.entrypoints import exit_codes
from quire.entrypoints.batches.beside import serve_batches
from quire.entrypoints.http.http_protocol import bounded_to, socket_protocol
from quire.entrypoints.http.listen import BACKLOG, ListenOptions, open_socket
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.realtime.routes import MAX_MESSAGE_BYTES, SOCKETS
from quire.entrypoints.responses.handover import Handover
from quire.errors import QuireError, ShutdownError
from quire.logger import init_logger

logger = init_logger(__name__)

COLLECT_AFTER = (50_000, 20, 50)
"""When Python's collector runs, in objects: a burst of requests makes many that go by themselves."""
CLOSE_TIMEOUT_S = 5.0
"""How long a forced end waits for connections to close."""


OPEN_FILES = 65_536
"""Open files that the server asks the system for."""
TELL_TIMEOUT_S = 5.0
"""How long a server waits until its streams have been told that they are cut off."""
SPARE_FILES = 64
"""Of those it may have, so many are for files, pipes and sockets other than clients'."""


def _max_connections() -> int | None:
    """Connections that the limit of open files allows; None: there is no such limit."""
    limit = raise_limit(OPEN_FILES)
    return None if limit is None else max(1, limit - SPARE_FILES)


class QuietServer(uvicorn.Server):
    """uvicorn's server without its ten ticks a second (an idle server uses no CPU) and without its signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()


class ServerProcess:
    """One server, from socket to exit code.

    Args:
        build_engine: makes the engine; called in a thread: it takes seconds.
        on_ready: called once, with the engine in place and the URL.
        private: a second socket, on which the server's other processes ask this one.
        handover: to a server that is started in this one's place; None: what has not ended in time is lost.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        listener: socket.socket,
        options: ListenOptions,
        build_engine: Callable[[], Any],
        on_ready: Callable[[Any, float], None],
        private: socket.socket | None = None,
        handover: Handover | None = None,
    ) -> None:
        self._app = app
        self._state = state
        self._listeners = [listener] if private is None else [listener, private]
        self._options = options
        self._build_engine = build_engine
        self._on_ready = on_ready
        self._handover = handover
        self._exit_code = exit_codes.OK
        self._signals = 0
        self._engine: Any = None
        self._server: QuietServer
        self._drain: asyncio.Task[None] | None = None

    def run(self) -> int:
        """Serve until told to end; the process's exit code."""
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(self._main())

    async def _main(self) -> int:
        config = self._uvicorn_config()
        self._server = QuietServer(config)
        self._install_signal_handlers()
        serving = asyncio.ensure_future(self._server.serve(sockets=self._listeners))
        beside = [asyncio.ensure_future(self._load())]
        if self._options.ssl_refresh:
            beside.append(asyncio.ensure_future(refresh_certificates(config, self._options)))
        if self._state.batches is not None:
            beside.append(asyncio.ensure_future(serve_batches(self._app, self._state, self._state.batches)))
        try:
            await serving
        finally:
            for task in beside:
                task.cancel()
            await self._close_engine()
            if self._options.uds:
                with contextlib.suppress(OSError):
                    os.unlink(self._options.uds)
        return self._exit_code

    def _uvicorn_config(self) -> uvicorn.Config:
        options = self._options
        config = uvicorn.Config(
            self._app,
            http=bounded_to(
                options.max_header_bytes,
                options.max_header_count,
                self._state.settings.error_format,
                _max_connections(),
                [route.path for route in SOCKETS],
            ),
            ws=socket_protocol,  # pyright: ignore[reportArgumentType] # makes one
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=options.access_log,
            log_level=options.log_level,
            backlog=BACKLOG,
            server_header=False,
            date_header=False,
            timeout_keep_alive=envs.QUIRE_HTTP_TIMEOUT_KEEP_ALIVE,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=options.ssl_cert_reqs,
            ssl_ciphers=options.ssl_ciphers,
        )
        _share_log_handlers(options)
        return config

    async def _load(self) -> None:
        began = time.monotonic()
        try:
            self._engine = await asyncio.to_thread(self._build_engine)
        except asyncio.CancelledError:
            raise
        except QuireError as error:
            logger.error("%s", error)
            self._fail(exit_codes.of_error(error))
            return
        except Exception:
            logger.exception("The engine could not be started.")
            self._fail(exit_codes.FAILED)
            return
        gc.collect()
        gc.freeze()  # what was loaded stays: later collections need not look at it
        gc.set_threshold(*COLLECT_AFTER)
        if not self._options.keep_alive_on_engine_death:
            loop = asyncio.get_running_loop()
            self._engine.on_death = lambda: loop.call_soon_threadsafe(self._on_death)
            if self._engine.errored:  # before anyone could be told
                self._on_death()
        self._state.engine_or_none = self._engine
        if self._handover is not None:
            await self._handover.pick_up()
        self._on_ready(self._engine, time.monotonic() - began)

    def _fail(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._server.stop()

    def _on_death(self) -> None:
        """End with an exit code that makes an orchestrator start another server; first the streams hear of it."""
        if self._drain is None and not self._signals:  # otherwise it ends because it was told to
            self._exit_code = exit_codes.FAILED
            self._drain = asyncio.ensure_future(self._end_after_death())

    async def _end_after_death(self) -> None:
        self._state.draining = True
        await self._await_idle()
        logger.error("The engine has died: the server ends with exit code %d.", self._exit_code)
        self._force_stop()

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if number == signal.SIGTERM and self._signals == 1:
            self._drain = asyncio.ensure_future(self._drain_and_stop())
            return
        self._exit_code = (
            exit_codes.INTERRUPTED if number == signal.SIGINT and self._signals == 1 else exit_codes.FAILED
        )
        if self._signals > 2 or self._engine is None:
            # A thread that is reading weights cannot be interrupted; nothing has been accepted that could be lost.
            os._exit(self._exit_code)
        logger.info("Ending at once; %d request(s) are cut off.", self._state.in_flight)
        self._force_stop()

    async def _drain_and_stop(self) -> None:
        """Finish what runs, accept nothing new, then stop."""
        self._state.draining = True
        if self._engine is None:
            os._exit(exit_codes.OK)
        timeout = self._options.shutdown_timeout_s
        if self._state.in_flight:
            logger.info("Draining: %d request(s) are running; waiting up to %.0f s.", self._state.in_flight, timeout)
        try:
            await asyncio.wait_for(self._state.idle.wait(), timeout)
        except TimeoutError:
            if self._handover is not None:
                await self._handover.leave()
                await self._await_idle()
            if self._state.in_flight:
                logger.error("%d request(s) did not end in %.0f s and are cut off.", self._state.in_flight, timeout)
                await self._cut_off()
                return
        logger.info("Drained.")
        self._server.stop()

    async def _cut_off(self) -> None:
        """Tell those whose requests run that there will be no more, and stop."""
        self._exit_code = exit_codes.FAILED
        self._engine.end_requests(ShutdownError("The server ends before the answer is complete."))
        await self._await_idle()
        self._force_stop()

    async def _await_idle(self) -> None:
        """Until all that runs has ended; for a while."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.idle.wait(), TELL_TIMEOUT_S)

    def _force_stop(self) -> None:
        self._state.draining = True
        self._state.forced = True
        self._server.force_exit = True
        for task in tuple(self._server.server_state.tasks):
            task.cancel()
        self._server.stop()
        # A connection that does not close must not keep the process.
        asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, os._exit, self._exit_code)

    async def _close_engine(self) -> None:
        if self._engine is None:
            return
        try:
            await asyncio.wait_for(asyncio.to_thread(self._engine.shutdown), CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.error("The engine did not end in %.0f s.", CLOSE_TIMEOUT_S)
            os._exit(self._exit_code or exit_codes.FAILED)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _share_log_handlers(options: ListenOptions) -> None:
    """Format uvicorn's log lines as ours, unless the operator has set up Python's logging."""
    if options.quiet_paths:
        logging.getLogger("uvicorn.access").addFilter(_QuietPaths(options.quiet_paths))
    if envs.QUIRE_LOGGING_CONFIG_PATH:
        return
    handlers = logging.getLogger("quire").handlers
    for name in ("uvicorn.error", "uvicorn.access") if options.access_log else ("uvicorn.error",):
        other = logging.getLogger(name)
        other.handlers = list(handlers)
        other.propagate = not handlers
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, _level(options.log_level)))


class _QuietPaths(logging.Filter):
    """Drops lines about requests to some paths. uvicorn's records have the path, with its query, as the third argument."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        return str(arguments[2]).partition("?")[0] not in self._paths


def _level(name: str) -> int:
    return logging.getLevelNamesMapping().get(name.upper(), logging.INFO)


LOOK_EVERY_S = 5.0
"""Seconds between two looks at the files."""


async def refresh_certificates(config: uvicorn.Config, options: ListenOptions) -> None:
    """Look at the files until cancelled."""
    seen = _stamps(options)
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = _stamps(options)
        if now == seen or config.ssl is None or not options.ssl_certfile:
            continue
        try:
            config.ssl.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
            if options.ssl_ca_certs:
                config.ssl.load_verify_locations(options.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:  # half-written, or a pair that does not match yet
            logger.warning("The TLS files have changed and cannot be read yet: %s", error)
            continue
        seen = now
        logger.info("The TLS files have changed and were read again.")


def _stamps(options: ListenOptions) -> list[tuple[int, int] | None]:
    """When each file was written last, and its size; None for one that is not there."""
    stamps: list[tuple[int, int] | None] = []
    for path in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs):
        try:
            status = os.stat(path or "")
            stamps.append((status.st_mtime_ns, status.st_size))
        except OSError:
            stamps.append(None)
    return stamps


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
