"""The folder of a batch store: an SQLite database, the content of uploaded files, and the lock of who runs the batches."""

import contextlib
import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.entrypoints.database import Database, Missing
from quire.errors import ConfigError

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, purpose TEXT NOT NULL, expires REAL,
    batch INTEGER, is_error INTEGER, body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, status TEXT NOT NULL,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_status ON batches (status);
CREATE TABLE IF NOT EXISTS lines (
    batch INTEGER NOT NULL, number INTEGER NOT NULL, custom_id TEXT, is_error INTEGER, request BLOB, result BLOB,
    PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)
);
CREATE INDEX IF NOT EXISTS unanswered ON lines (number, batch) WHERE result IS NULL;
"""
ORPHAN_AGE_S = 24 * 3600.0
"""Content without a file that was written so long ago belongs to an upload that was cut off."""


class BatchFolder:
    """A folder that batches are kept in; made if need be, in one that is there.

    Args:
        path: of the folder.
        setting: the flag that names it.
        clock: seconds since the epoch.

    Raises:
        ConfigError: it cannot be written, or holds something else.
    """

    def __init__(self, path: str, setting: str, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self.clock = clock
        try:
            for folder in (self._path, self._path / "files"):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError.of(setting, f"cannot write in {path!r}: {error.strerror}.") from None
        self.database = Database(str(self._path / "batches.sqlite"), _TABLES, setting=setting, is_durable=True)
        self._lock: int | None = None

    def content(self, file_id: str) -> Path:
        """Where the content of an uploaded file is; the id is one of ours."""
        return self._path / "files" / file_id

    def lock(self) -> bool:
        """Whether this process may run the batches: one at a time, until it ends, however it ends."""
        if self._lock is None:
            handle = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
            self._lock = handle
        return True

    def close(self) -> None:
        self.database.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- in the database's thread ---

    def page(
        self, table: str, where: str, values: tuple[Any, ...], after: str | None, limit: int, is_oldest_first: bool
    ) -> tuple[list[tuple[Any, ...]], bool]:
        """Rows of a table in the order in which they were made, behind the one with an id, and whether there are more.
        Raises Missing: there is no such one."""
        if after is not None:
            row = self.database.connection.execute(f"SELECT number FROM {table} WHERE id = ?", (after,)).fetchone()
            if row is None:
                raise Missing(after)
            where, values = f"{where} AND number {'>' if is_oldest_first else '<'} ?", (*values, row[0])
        order = "ASC" if is_oldest_first else "DESC"
        query = f"SELECT * FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
        rows = self.database.connection.execute(query, (*values, limit + 1)).fetchall()
        return rows[:limit], len(rows) > limit

    def remove_old(self) -> None:
        """Remove files that have expired, and what uploads left behind that were cut off."""
        now = self.clock()
        rows = self.database.connection.execute("SELECT id FROM files WHERE expires <= ?", (now,)).fetchall()
        for (file_id,) in rows:
            self.remove_file(file_id)
        with contextlib.suppress(OSError):
            for path in self.content("").iterdir():
                known = self.database.connection.execute("SELECT 1 FROM files WHERE id = ?", (path.name,)).fetchone()
                if known is None and path.stat().st_mtime < now - ORPHAN_AGE_S:
                    path.unlink()

    def remove_file(self, file_id: str) -> None:
        """Remove a file: its content, or the results that it shows. Raises Missing: there is none."""
        with self.database.transaction() as database:
            row = database.execute("SELECT batch, is_error FROM files WHERE id = ?", (file_id,)).fetchone()
            if row is None:
                raise Missing(file_id)
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
            if row[0] is not None:
                database.execute("DELETE FROM lines WHERE batch = ? AND is_error = ?", row)
        self.content(file_id).unlink(missing_ok=True)


def is_full(error: Exception) -> bool:
    """Whether the disk has no room left."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
