"""Files of batches: what was uploaded, as files on disk; what batches gave, as a view of their results."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from typing import BinaryIO

import msgspec

from quire.entrypoints.batches.protocol import FileObject
from quire.entrypoints.batches.tables import BatchFolder
from quire.entrypoints.database import Missing

PIECE_BYTES = 1 << 20
RESULTS_AT_ONCE = 64
_decode = msgspec.json.Decoder(FileObject).decode


class Upload:
    """A file that is being received.

    Attributes:
        id: of the file that it becomes. It cannot be guessed.
        size: bytes so far.
    """

    def __init__(self, folder: BatchFolder) -> None:
        self.id = f"file-{secrets.token_hex(16)}"
        self.size = 0
        self._path = folder.content(self.id)
        self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._waiting = bytearray()

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        self._waiting += data
        if len(self._waiting) >= PIECE_BYTES:
            await self._flush()

    async def finish(self) -> None:
        """All of it is on the disk."""
        await self._flush()
        await asyncio.to_thread(self._sync)

    def cancel(self) -> None:
        """It becomes no file."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)

    async def _flush(self) -> None:
        piece, self._waiting = self._waiting, bytearray()
        await asyncio.to_thread(self._file.write, piece)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class FileStore:
    """The files of a store."""

    def __init__(self, folder: BatchFolder) -> None:
        self._folder = folder
        self._database = folder.database

    def begin(self) -> Upload:
        """A new file is about to be received."""
        return Upload(self._folder)

    async def add(self, upload: Upload, filename: str, purpose: str, expires_after: int | None) -> FileObject:
        """An upload that is finished becomes a file."""
        now = int(self._folder.clock())
        expires = None if expires_after is None else now + expires_after
        file = FileObject(
            id=upload.id, bytes=upload.size, created_at=now, expires_at=expires, filename=filename, purpose=purpose
        )
        await self._database.run(self.insert, file, None, None)
        return file

    async def get(self, file_id: str) -> FileObject:
        """A file. Raises Missing: there is none."""
        return (await self._database.run(self._find, file_id))[0]

    async def page(
        self, purpose: str | None, after: str | None, limit: int, is_oldest_first: bool
    ) -> tuple[list[FileObject], bool]:
        """Files, and whether there are more. Raises Missing: there is no file `after`."""
        where, values = "(expires IS NULL OR expires > ?)", (self._folder.clock(),)
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", (*values, purpose)
        rows, has_more = await self._database.run(
            self._folder.page, "files", where, values, after, limit, is_oldest_first
        )
        return [_decode(row[-1]) for row in rows], has_more

    async def delete(self, file_id: str) -> None:
        """Remove a file and its content. Raises Missing: there is none."""
        await self._database.run(self._folder.remove_file, file_id)

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        """A file's content, in pieces. Raises Missing: there is none."""
        _, batch, is_error = await self._database.run(self._find, file_id)
        if batch is not None:
            return self.read_results(batch, is_error)
        try:
            return _read_pieces(await asyncio.to_thread(open, self._folder.content(file_id), "rb"))
        except FileNotFoundError:
            raise Missing(file_id) from None

    async def read_results(self, batch: int, is_error: int | None = None) -> AsyncIterator[bytes]:
        """The results of a batch in the order of its lines: all, those that are errors, or those that are not."""
        last: int | None = 0
        while last is not None:
            lines, last = await self._database.run(self._results_after, batch, is_error, last)
            if lines:
                yield lines

    def open_content(self, file_id: str) -> BinaryIO:
        """An uploaded file. Raises FileNotFoundError: it was deleted."""
        return open(self._folder.content(file_id), "rb")

    # --- in the database's thread ---

    def insert(self, file: FileObject, batch: int | None, is_error: int | None) -> None:
        """Add a file: one that was uploaded, or one that shows results."""
        row = (file.id, file.purpose, file.expires_at, batch, is_error, msgspec.json.encode(file))
        self._database.connection.execute(
            "INSERT INTO files (id, purpose, expires, batch, is_error, body) VALUES (?, ?, ?, ?, ?, ?)", row
        )

    def _find(self, file_id: str) -> tuple[FileObject, int | None, int | None]:
        query = "SELECT body, batch, is_error FROM files WHERE id = ? AND (expires IS NULL OR expires > ?)"
        row = self._database.connection.execute(query, (file_id, self._folder.clock())).fetchone()
        if row is None:
            raise Missing(file_id)
        return _decode(row[0]), row[1], row[2]

    def _results_after(self, batch: int, is_error: int | None, last: int) -> tuple[bytes, int | None]:
        query = "SELECT number, result FROM lines WHERE batch = ? AND number > ? AND result IS NOT NULL"
        query += "" if is_error is None else f" AND is_error = {is_error:d}"
        rows = self._database.connection.execute(f"{query} ORDER BY number LIMIT {RESULTS_AT_ONCE}", (batch, last))
        found = rows.fetchall()
        return b"".join(result for _, result in found), found[-1][0] if len(found) == RESULTS_AT_ONCE else None


async def _read_pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
