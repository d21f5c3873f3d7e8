"""Batches that are kept: their objects, their lines, and each line's result, which is written once.

A line's result and the mark that it is done are one row, so an answer is never lost and never there twice. Files of results are
views of these rows. Knows states and times; nothing of what a line asks.
"""

import contextlib
import secrets
import sqlite3
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

import msgspec

from quire.entrypoints.batches.files import FileStore
from quire.entrypoints.batches.protocol import (
    BatchCreateRequest,
    BatchError,
    BatchObject,
    BatchResult,
    FaultList,
    FileObject,
    Line,
    LineFault,
    RequestCounts,
)
from quire.entrypoints.batches.tables import BatchFolder
from quire.entrypoints.database import Missing, in_thread

WRITTEN_AT_ONCE = 1000
"""Lines that a transaction ends that were not answered."""
_ACTIVE = "('validating', 'in_progress', 'finalizing', 'cancelling')"
_UNITS_S = {"h": 3600, "d": 24 * 3600}
EXPIRED = BatchError("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = BatchError("batch_cancelled", "This request was not executed before the batch was cancelled.")
LineKey = tuple[int, int]  # the number of the batch, and of the line
_decode = msgspec.json.Decoder(BatchObject).decode


class BatchRow(NamedTuple):
    """A batch, and its number in the store."""

    number: int
    batch: BatchObject

    @property
    def num_unanswered(self) -> int:
        counts = self.batch.request_counts
        return counts.total - counts.completed - counts.failed


class NotCancellable(Exception):
    """The batch is over: `args[0]` is its status."""


class BatchStore:
    """The batches of a folder. Several processes may use it at once."""

    def __init__(self, folder: BatchFolder) -> None:
        self._folder = folder
        self._database = folder.database
        self.files = FileStore(folder)

    @property
    def now(self) -> int:
        """Seconds since the epoch."""
        return int(self._folder.clock())

    @in_thread
    def create(self, request: BatchCreateRequest, *, expires: bool = True) -> BatchObject:
        """A new batch of a file that is there; its window is over once, or never."""
        now, window = self.now, request.completion_window
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + int(window[:-1]) * _UNITS_S[window[-1]] if expires else None,
            metadata=request.metadata,
            output_expires_after=request.output_expires_after,
        )
        row = (batch.id, batch.status, msgspec.json.encode(batch))
        self._connection.execute("INSERT INTO batches (id, status, body) VALUES (?, ?, ?)", row)
        return batch

    async def get(self, batch_id: str) -> BatchRow:
        """A batch. Raises Missing: there is none."""
        return await self._database.run(self._find, batch_id)

    async def page(self, after: str | None, limit: int) -> tuple[list[BatchObject], bool]:
        """Batches, the newest first, and whether there are more. Raises Missing: there is no batch `after`."""
        rows, has_more = await self._database.run(self._folder.page, "batches", "TRUE", (), after, limit, False)
        return [_row_of(row).batch for row in rows], has_more

    @in_thread
    def active(self) -> list[BatchRow]:
        """The batches that are not over, oldest first."""
        query = f"SELECT * FROM batches WHERE status IN {_ACTIVE} ORDER BY number"
        return [_row_of(row) for row in self._connection.execute(query)]

    @in_thread
    def cancel(self, batch_id: str) -> BatchObject:
        """Start no further line of a batch. Raises Missing: there is none, NotCancellable: it is over."""
        with self._changed(batch_id) as batch:
            if batch.status in ("validating", "in_progress"):
                batch.status, batch.cancelling_at = "cancelling", self.now
            elif batch.status != "cancelling":
                raise NotCancellable(batch.status)
        return batch

    async def forget_lines(self, row: BatchRow) -> None:
        """What an earlier validation read that was cut off."""
        await self._database.run(self._forget_lines, row.number)

    @in_thread
    def add_lines(self, row: BatchRow, lines: Sequence[Line]) -> list[Line]:
        """Keep lines of a batch that is being validated, those with an error as answered. Gives those back, with their error,
        whose `custom_id` an earlier line has; they are not kept."""
        repeated: list[Line] = []
        num_failed = 0
        with self._database.transaction() as database:
            for line in lines:
                if line.error is None:
                    values = (row.number, line.number, line.custom_id, None, line.text, None)
                else:
                    result = BatchResult(custom_id=line.custom_id, error=line.error).as_line()
                    values = (row.number, line.number, None, True, None, result)
                    num_failed += 1
                if not database.execute("INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?, ?, ?)", values).rowcount:
                    message = f"custom_id: {(line.custom_id or '')[:200]!r} is on an earlier line too."
                    repeated.append(line._replace(error=BatchError("duplicate_custom_id", message)))
            count = "UPDATE batches SET total = total + ?, failed = failed + ? WHERE number = ?"
            database.execute(count, (len(lines) - len(repeated), num_failed, row.number))
        return repeated

    @in_thread
    def begin(self, row: BatchRow) -> None:
        """The lines are all there: they may be answered."""
        with self._changed(row.batch.id) as batch:
            if batch.status == "validating":
                batch.status, batch.in_progress_at = "in_progress", self.now

    @in_thread
    def fail(self, row: BatchRow, faults: list[LineFault]) -> None:
        """The input is refused."""
        self._forget_lines(row.number)
        with self._changed(row.batch.id) as batch:
            if batch.status == "validating":
                batch.status, batch.failed_at, batch.errors = "failed", self.now, FaultList(data=faults)

    @in_thread
    def unanswered(self, limit: int) -> list[LineKey]:
        """Lines without a result, of all batches in progress: first lines first, so that a short batch does not wait for a
        long one."""
        running = "SELECT number FROM batches WHERE status = 'in_progress'"
        query = f"SELECT batch, number FROM lines INDEXED BY unanswered WHERE result IS NULL AND batch IN ({running})"
        return self._connection.execute(f"{query} ORDER BY number, batch LIMIT ?", (limit,)).fetchall()

    @in_thread
    def request(self, key: LineKey) -> bytes:
        """A line as it came."""
        return self._connection.execute("SELECT request FROM lines WHERE batch = ? AND number = ?", key).fetchone()[0]

    async def record(self, results: Iterable[tuple[LineKey, BatchResult]]) -> None:
        """Keep results. A line that has one keeps that."""
        await self._database.run(
            self._record, [(key, result.error is not None, result.as_line()) for key, result in results]
        )

    @in_thread
    def finalize(self, row: BatchRow) -> None:
        """Start no further line of a batch: all are answered, or its time is over."""
        with self._changed(row.batch.id) as batch:
            if batch.status == "in_progress":
                batch.status, batch.finalizing_at = "finalizing", self.now
                batch.expired_at = self.now if BatchRow(row.number, batch).num_unanswered else None

    @in_thread
    def finish(self, row: BatchRow) -> BatchObject:
        """A batch of which no line runs is over: lines without an answer get an error, and the files are there."""
        if row.batch.in_progress_at is None:
            self._forget_lines(row.number)
        number, batch = self._find(row.batch.id)
        error = CANCELLED if batch.cancelling_at is not None else EXPIRED
        query = "SELECT number, custom_id FROM lines WHERE batch = ? AND number > ? AND result IS NULL ORDER BY number"
        last = 0
        while lines := self._connection.execute(f"{query} LIMIT {WRITTEN_AT_ONCE}", (number, last)).fetchall():
            results = [(line, BatchResult(custom_id=name, error=error).as_line()) for line, name in lines]
            self._record([((number, line), True, result) for line, result in results])
            last = lines[-1][0]
        if batch.cancelling_at is not None:
            batch.status, batch.cancelled_at = "cancelled", self.now
        elif batch.expired_at is not None:
            batch.status = "expired"
        else:
            batch.status, batch.completed_at = "completed", self.now
        with self._database.transaction():
            batch.output_file_id = self._show_results(number, batch, False)
            batch.error_file_id = self._show_results(number, batch, True)
            self._write(BatchRow(number, batch))
        return self._find(row.batch.id).batch

    async def remove_old(self) -> None:
        """Remove files that have expired."""
        await self._database.run(self._folder.remove_old)

    # --- in the database's thread ---

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._database.connection

    def _find(self, batch_id: str) -> BatchRow:
        row = self._connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
        if row is None:
            raise Missing(batch_id)
        return _row_of(row)

    @contextlib.contextmanager
    def _changed(self, batch_id: str) -> Generator[BatchObject]:
        """A batch, which is kept as it is afterwards."""
        with self._database.transaction():
            row = self._find(batch_id)
            yield row.batch
            self._write(row)

    def _write(self, row: BatchRow) -> None:
        values = (row.batch.status, msgspec.json.encode(row.batch), row.number)
        self._connection.execute("UPDATE batches SET status = ?, body = ? WHERE number = ?", values)

    def _forget_lines(self, number: int) -> None:
        with self._database.transaction() as database:
            database.execute("DELETE FROM lines WHERE batch = ?", (number,))
            database.execute("UPDATE batches SET total = 0, completed = 0, failed = 0 WHERE number = ?", (number,))

    def _record(self, results: list[tuple[LineKey, bool, bytes]]) -> None:
        counts: Counter[tuple[int, bool]] = Counter()
        write = "UPDATE lines SET is_error = ?, request = NULL, result = ? WHERE batch = ? AND number = ? AND result IS NULL"
        with self._database.transaction() as database:
            for key, is_error, result in results:
                counts[key[0], is_error] += database.execute(write, (is_error, result, *key)).rowcount
            for (batch, is_error), count in counts.items():
                column = "failed" if is_error else "completed"
                database.execute(f"UPDATE batches SET {column} = {column} + ? WHERE number = ?", (count, batch))

    def _show_results(self, number: int, batch: BatchObject, is_error: bool) -> str | None:
        """A file that shows the results of one kind; None where there are none."""
        query = "SELECT count(*), sum(length(result)) FROM lines WHERE batch = ? AND is_error = ?"
        count, size = self._connection.execute(query, (number, is_error)).fetchone()
        if not count:
            return None
        expires = batch.output_expires_after
        file = FileObject(
            id=f"file-{secrets.token_hex(16)}",
            bytes=size,
            created_at=self.now,
            expires_at=None if expires is None else self.now + expires.seconds,
            filename=f"{batch.id}_{'error' if is_error else 'output'}.jsonl",
            purpose="batch_output",
        )
        self.files.insert(file, number, is_error)
        return file.id


def _row_of(row: tuple[int, str, str, int, int, int, bytes]) -> BatchRow:
    batch = _decode(row[-1])
    batch.request_counts = RequestCounts(*row[3:6])
    return BatchRow(row[0], batch)
