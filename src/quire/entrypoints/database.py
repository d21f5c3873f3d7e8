"""SQLite in a thread of its own: an event loop waits for it without standing still."""

import asyncio
import contextlib
import functools
import os
import sqlite3
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from quire.errors import refusing

ResultT = TypeVar("ResultT")
Given = ParamSpec("Given")
BUSY_TIMEOUT_S = 60.0
"""How long a transaction waits for one of another process."""


def _keep_journal_beside(connection: sqlite3.Connection) -> None:
    """Readers do not wait for a writer. SQLite does not wait where another process opens the new file at the same moment."""
    until = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > until:
                raise
            time.sleep(0.01)


class Missing(Exception):
    """There is nothing with this id: `args[0]`."""


class Database:
    """A connection that only its thread uses.

    Args:
        path: a file, made if need be, that only its owner may read; None: in memory.
        tables: the statements that make them.
        setting: the flag that names the file.
        is_durable: what was written outlives a power failure, and not only the end of the process.
        on_open: called in the thread, once the tables are there.

    Raises:
        ConfigError: the file cannot be opened, or is none of ours.
    """

    def __init__(
        self,
        path: str | None,
        tables: str,
        *,
        setting: str,
        is_durable: bool = False,
        on_open: Callable[[sqlite3.Connection], None] | None = None,
    ) -> None:
        self._path = path
        self._tables = tables
        self._is_durable = is_durable
        self._on_open = on_open
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=setting)
        self._opened: sqlite3.Connection | None = None
        if path is not None:
            with refusing(OSError, sqlite3.Error, setting=setting, what=f"{setting}: {path!r} cannot be opened"):
                self._thread.submit(self._open).result()

    async def run(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """What a function gives that is called in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def close(self) -> None:
        if self._opened is not None:
            self._thread.submit(self._opened.close).result()
        self._thread.shutdown()

    # --- in the thread ---

    @property
    def connection(self) -> sqlite3.Connection:
        return self._opened or self._open()

    @contextlib.contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """All of it happens, or nothing."""
        with self.connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def _open(self) -> sqlite3.Connection:
        if self._path is not None:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self._path or ":memory:", BUSY_TIMEOUT_S, isolation_level=None)
        if self._path is not None:
            _keep_journal_beside(connection)
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._is_durable else 'NORMAL'}")
            connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.executescript(self._tables)
        if self._on_open is not None:
            self._on_open(connection)
        self._opened = connection
        return connection


class _Stored(Protocol):
    _database: Database


StoreT = TypeVar("StoreT", bound=_Stored)


def in_thread(
    method: Callable[Concatenate[StoreT, Given], ResultT],
) -> Callable[Concatenate[StoreT, Given], Coroutine[Any, Any, ResultT]]:
    """A method of a store that runs in the thread of its `_database`, while its caller waits."""

    @functools.wraps(method)
    async def wait(self: StoreT, *args: Given.args, **kwargs: Given.kwargs) -> ResultT:
        return await self._database.run(functools.partial(method, self, *args, **kwargs))

    return wait
