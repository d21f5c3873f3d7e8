"""Responses that are kept: SQLite in a file or in memory, in a thread of its own, bounded in number, bytes and age.

Knows ids and JSON; knows nothing of what a response means. Ids cannot be guessed: a client may read what it can name.
"""

import dataclasses
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from quire.entrypoints.database import Database, Missing, in_thread

MAX_AGE_S = 30 * 24 * 3600.0
"""How long a response is kept after it was last part of a conversation."""
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, used REAL NOT NULL, size INTEGER NOT NULL,
    is_running INTEGER NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL, events BLOB
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used, size);
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS by_response ON items (response);
"""
_CONVERSATION = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ? AND used >= ?
    UNION ALL SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain c ON r.id = c.previous WHERE used >= ?
) SELECT r.id, r.previous, r.is_running, r.input, r.body FROM chain JOIN responses r USING (id) ORDER BY depth DESC
"""
_SURPLUS = """
DELETE FROM responses WHERE used < ? OR rowid IN (
    SELECT row FROM (
        SELECT rowid AS row, row_number() OVER newest AS place, sum(size) OVER newest AS bytes
        FROM responses WINDOW newest AS (ORDER BY used DESC ROWS UNBOUNDED PRECEDING)
    ) WHERE place > ? OR bytes > ?
)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreLimits:
    """What may be kept. The responses that were used longest ago go first; a sixteenth more may be there for a while."""

    responses: int
    bytes: int


MEMORY_LIMITS = StoreLimits(10_000, 256 << 20)
FILE_LIMITS = StoreLimits(1_000_000, 16 << 30)


@dataclasses.dataclass(slots=True)
class Record:
    """A kept response.

    Attributes:
        previous: the response that its conversation goes on from.
        body: the response, as JSON.
        input: the request's own items, as JSON.
        events: its stream, where it may be asked for again.
        item_ids: of its output.
    """

    id: str
    previous: str | None
    is_running: bool
    body: bytes
    input: bytes
    events: bytes | None = None
    item_ids: Sequence[str] = ()


class _Items(msgspec.Struct):
    """The part of a response that later ones need."""

    id: str
    output: list[dict[str, Any]]


class StillRunning(Exception):
    """The response is not complete: `args[0]` is its id."""


class ResponseStore:
    """Keeps responses.

    Args:
        path: a file, made if need be, that only its owner may read; None: in memory.

    Raises:
        ConfigError: the file cannot be opened, or is none of ours.
    """

    def __init__(
        self, path: str | None = None, limits: StoreLimits | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._limits = limits or (FILE_LIMITS if path else MEMORY_LIMITS)
        self._clock = clock
        self._new_responses = self._new_bytes = 0
        self._database = Database(path, _TABLES, setting="responses_store", on_open=self._prune)

    @in_thread
    def save(self, record: Record) -> None:
        """Keep a response, in place of what was kept under its id."""
        events = None if record.events is None else zlib.compress(record.events, 1)
        size = len(record.body) + len(record.input) + len(events or b"")
        row = (record.id, record.previous, self._clock(), size, record.is_running, record.body, record.input, events)
        with self._database.transaction() as database:
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            items = [(item_id, record.id) for item_id in record.item_ids]
            database.executemany("INSERT OR REPLACE INTO items VALUES (?, ?)", items)
        self._new_responses += 1
        self._new_bytes += size
        if self._new_responses > self._limits.responses // 16 or self._new_bytes > self._limits.bytes // 16:
            self._prune(self._database.connection)

    @in_thread
    def get(self, response_id: str) -> Record:
        """A kept response. Raises Missing if there is none."""
        query = "SELECT id, previous, is_running, body, input, events FROM responses WHERE id = ? AND used >= ?"
        row = self._database.connection.execute(query, (response_id, self._oldest)).fetchone()
        if row is None:
            raise Missing(response_id)
        found, previous, is_running, body, given, events = row
        return Record(found, previous, bool(is_running), body, given, events and zlib.decompress(events))

    @in_thread
    def delete(self, response_id: str) -> None:
        """Forget a response. Raises Missing if there is none."""
        if not self._database.connection.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount:
            raise Missing(response_id)

    @in_thread
    def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """Every item up to the end of a response, oldest first.
        Raises Missing if a response is not kept, StillRunning if one is not complete."""
        rows = self._database.connection.execute(_CONVERSATION, (response_id, self._oldest, self._oldest)).fetchall()
        if not rows or rows[0][1] is not None:
            raise Missing(rows[0][1] if rows else response_id)
        found: list[dict[str, Any]] = []
        for row_id, _, is_running, given, body in rows:
            if is_running:
                raise StillRunning(row_id)
            found += msgspec.json.decode(given, type=list[dict[str, Any]])
            found += msgspec.json.decode(body, type=_Items).output
        with self._database.transaction() as database:
            used = [(self._clock(), row[0]) for row in rows]
            database.executemany("UPDATE responses SET used = ? WHERE id = ?", used)
        return found

    @in_thread
    def items(self, item_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Items of responses' outputs, by id; those that are not there are left out."""
        query = "SELECT body FROM items JOIN responses ON response = responses.id WHERE items.id = ? AND used >= ?"
        wanted, found = set(item_ids), dict[str, dict[str, Any]]()
        for item_id in wanted:
            for (body,) in self._database.connection.execute(query, (item_id, self._oldest)):
                found |= {item["id"]: item for item in msgspec.json.decode(body, type=_Items).output}
        return {item_id: found[item_id] for item_id in wanted & found.keys()}

    def close(self) -> None:
        self._database.close()

    # --- in the database's thread ---

    @property
    def _oldest(self) -> float:
        return self._clock() - MAX_AGE_S

    def _prune(self, database: sqlite3.Connection) -> None:
        database.execute(_SURPLUS, (self._oldest, self._limits.responses, self._limits.bytes))
        self._new_responses = self._new_bytes = 0
