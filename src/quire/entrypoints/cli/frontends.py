"""`quire serve --api-server-count N`: N frontend processes before one engine core, and the process that looks after them.

This process owns the core and routes its outputs (`engine/router.py`); it serves no requests itself. A frontend that dies is
replaced and its requests are aborted; one that cannot start, or dies again and again, ends the server.
"""

import argparse
import dataclasses
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from quire import envs
from quire.entrypoints import exit_codes
from quire.entrypoints.http.api_keys import KeyEntry
from quire.entrypoints.http.listen import ListenOptions, open_socket
from quire.errors import ConfigError, QuireError
from quire.logger import init_logger
from quire.patch import marks
from quire.processes import start_child

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.arg_utils import AsyncEngineArgs

logger = init_logger(__name__)

MAX_COUNT = 64
MAX_DEATHS = 3
"""Deaths of frontends within `DEATHS_WITHIN_S` seconds after which the server ends."""
DEATHS_WITHIN_S = 60.0


def serve_frontends(
    args: argparse.Namespace,
    options: ListenOptions,
    engine_args: "AsyncEngineArgs",
    keys: "Sequence[KeyEntry]",
    announce: Callable[["EngineConfig", ListenOptions, float], None],
) -> int:
    """Serve until a signal ends it; the exit code. Raises ConfigError: a setting that cannot work."""
    if args.api_server_count > MAX_COUNT:
        raise ConfigError.of("api_server_count", f"{args.api_server_count} processes; at most {MAX_COUNT}.")
    from quire.engine.arg_resolve import UsageContext
    from quire.multimodal.processor_cache import sharing

    listener, options = open_socket(options, shared=True, listen=bool(options.uds))
    folder = tempfile.mkdtemp(prefix="quire-", dir=envs.QUIRE_RPC_BASE_PATH)
    try:
        if args.responses_store is None:
            args.responses_store = f"{folder}/responses.sqlite"
        config = engine_args.create_engine_config(UsageContext.API_SERVER)
        with sharing(config, args.api_server_count) as config:
            return Frontends(args, options, listener, folder, config, keys, announce).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if options.uds and os.path.exists(options.uds):
            os.unlink(options.uds)


class Frontends:
    """The frontends of one server, by number."""

    def __init__(
        self,
        args: argparse.Namespace,
        options: ListenOptions,
        listener: socket.socket,
        folder: str,
        config: "EngineConfig",
        keys: "Sequence[KeyEntry]",
        announce: Callable[["EngineConfig", ListenOptions, float], None],
    ) -> None:
        from quire.config.wire import config_to_plain
        from quire.engine.router import FrontendRouter

        self._count: int = args.api_server_count
        self._listener_fd = listener.fileno() if options.uds else None
        self._config = config
        self._options = options
        self._announce = announce
        self._life_fd, self._my_end = os.pipe()
        self._told: dict[str, Any] = {
            "args": {name: value for name, value in vars(args).items() if _is_plain(value)},
            "options": dataclasses.asdict(options),
            "keys": msgspec.to_builtins(keys),
            "config": config_to_plain(config),
            "patches": marks(),
            "folder": folder,
            "count": self._count,
            "life_fd": self._life_fd,
            "listener_fd": self._listener_fd,
        }
        self._router = FrontendRouter(Path(folder), self._count, self._on_serving)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._serving: set[int] = set()
        self._began = time.monotonic()
        self._is_announced = self._is_ending = False
        self._exit_code = 0
        self._deaths: list[float] = []
        self._client: Any = None

    def run(self) -> int:
        """Start everything, and look after it until no frontend is left."""
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for number in range(self._count):
            self._start(number, is_replacement=False)
        threading.Thread(target=self._load, name="engine-start", daemon=True).start()
        try:
            while self._children:
                for key, _ in self._selector.select():
                    if key.data is None:
                        os.read(self._wake_read, 4096)
                    else:
                        self._on_end(key.data)
        finally:
            for child in self._children.values():
                child.kill()
            if self._client is not None:
                self._client.shutdown()
            self._router.close()
        return self._exit_code

    def _load(self) -> None:
        """Start the core, in a thread: signals and frontends are looked after meanwhile."""
        from quire.engine.process_client import chosen_core, open_client

        try:
            self._client = open_client(self._config, chosen_core(), self._router.on_message)
        except Exception as error:
            logger.error("%s", error, exc_info=None if isinstance(error, QuireError) else error)
            self._exit_code = exit_codes.of_error(error)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._router.attach(self._client)

    def _start(self, number: int, is_replacement: bool) -> None:
        """Start a frontend. It leads a group of its own: a terminal's Ctrl-C comes to it through us."""
        kept = (self._life_fd,) if self._listener_fd is None else (self._life_fd, self._listener_fd)
        function = "quire.entrypoints.cli.frontend_child:main"
        child = start_child(function, kind="frontend", keep=kept, stdin=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None
        child.stdin.write(json.dumps({**self._told, "number": number, "is_replacement": is_replacement}).encode())
        child.stdin.close()
        self._children[number] = child
        self._selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, number + 1)

    def _on_serving(self, number: int) -> None:
        """In the router's thread: a frontend answers requests."""
        self._serving.add(number)
        if len(self._serving) == self._count and not self._is_announced:
            self._is_announced = True
            self._announce(self._config, self._options, time.monotonic() - self._began)

    def _on_end(self, data: int) -> None:
        """A frontend has ended: as it should, or to be replaced."""
        number = data - 1
        child = self._children.pop(number)
        code = child.wait()
        (key,) = [key for key in self._selector.get_map().values() if key.data == data]
        self._selector.unregister(key.fd)
        os.close(key.fd)
        if self._is_ending:
            self._exit_code = self._exit_code or (code if code > 0 else 0)
            return
        lost = self._router.forget(number)
        self._deaths = [*(at for at in self._deaths if time.monotonic() - at < DEATHS_WITHIN_S), time.monotonic()]
        if number not in self._serving or len(self._deaths) > MAX_DEATHS:
            logger.error("Frontend %d ended with code %d; the server ends.", number, code)
            self._exit_code = exit_codes.FAILED
            self._end(signal.SIGTERM)
            return
        logger.error("Frontend %d ended with code %d; %d request(s) are lost. It is replaced.", number, code, lost)
        self._serving.discard(number)
        self._start(number, is_replacement=True)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._end(number)

    def _end(self, number: int) -> None:
        """Pass a signal on; every frontend does what a server alone would."""
        self._is_ending = True
        for child in self._children.values():
            if child.poll() is None:
                child.send_signal(number)


def _is_plain(value: Any) -> bool:
    """Whether JSON knows it."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in cast("list[Any]", value))
    return value is None or isinstance(value, str | int | float | bool)
