"""Contents by name in the files of one folder, for several processes at once: each is whole or not there, all together take no
more than a bound, and what was used least recently goes first.

A file has a checksum, then its content. It is written beside its place and renamed. One word in the folder says how many bytes
there are; who changes it holds the folder's lock, which the kernel releases when its holder dies, and then files are counted
again. A folder may end with the process that has made it. Knows names and bytes.
"""

import collections
import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

DIGEST = 16
_LOCK = "lock"
_WORD = struct.Struct("=q")
_UNKNOWN = -1

Piece = bytes | memoryview


class KeptFiles:
    """The files of one folder. May be used by several threads, and by as many processes as like.

    Args:
        folder: which is there, and only its owner may enter.
        most: bytes of all files together, also of those that are being written.
        lasting: they outlive this machine's start, and have a cryptographic checksum. Others are mapped into each process that
            reads them, once at a time.
    """

    def __init__(self, folder: Path, most: int, *, lasting: bool) -> None:
        self._folder, self._most, self._lasting = folder, most, lasting
        self._mutex = threading.Lock()
        self._lock_fd = -1
        self._bytes = 0
        self._oldest: collections.deque[tuple[int, bytes]] = collections.deque()
        """What there was when files were counted, by the time of its last use."""
        self._mapped: weakref.WeakValueDictionary[bytes, mmap.mmap] = weakref.WeakValueDictionary()
        """What is in use: each has a descriptor."""
        self._serial = itertools.count()

    def read(self, name: bytes) -> memoryview:
        """A content, which was used now. It stays readable when its file is removed.
        Raises OSError: it is not there. Raises ValueError: it is damaged, and not there any more."""
        path = self._file(name)
        if (mapped := self._mapped.get(name)) is not None:
            _use(path)
            return memoryview(mapped)[DIGEST:]
        with open(path, "rb") as file:
            try:
                mapped = None if self._lasting else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                data = memoryview(file.read() if mapped is None else mapped)
                if self._digest(name, [data[DIGEST:]]) != bytes(data[:DIGEST]):
                    raise ValueError(f"{path} is damaged")
            except ValueError:
                with self._alone():
                    self._unlink(path)
                raise
            _use(file.fileno())
        if mapped is not None:
            self._mapped[name] = mapped
        return data[DIGEST:]

    def write(self, name: bytes, content: Sequence[Piece]) -> list[bytes]:
        """Keep these pieces as one content, unless there is one already; the names that had to go, which is its own where there
        is no room for it. Raises OSError: it could not be written."""
        file, size = self._file(name), DIGEST + sum(map(len, content))
        if file.exists() or size > self._most:
            return [] if file.exists() else [name]
        with self._alone():
            removed = self._make_room(size)
            if self._bytes + size > self._most:  # others are writing
                return [*removed, name]
            part, opened = self._begin(file, size)
        with opened:
            try:
                opened.writelines([self._digest(name, content), *content])
                opened.flush()
                _use(opened.fileno())
                with self._alone():
                    if file.exists():  # another writer was faster
                        self._unlink(part)
                    else:
                        part.rename(file)
            except OSError:
                with self._alone():
                    self._unlink(part)
                raise
        return removed

    def clear(self) -> None:
        """Forget everything that is not being written."""
        with self._alone():
            for name in list(names_in(self._folder)):
                self._unlink(self._file(name))

    def _file(self, name: bytes) -> Path:
        return self._folder / name[:1].hex() / name.hex()

    def _digest(self, name: bytes, content: Sequence[Piece]) -> bytes:
        if not self._lasting:
            value = zlib.crc32(name)
            for piece in content:
                value = zlib.crc32(piece, value)
            return value.to_bytes(DIGEST, "big")
        digest = hashlib.blake2b(digest_size=DIGEST, key=name)
        for piece in content:
            digest.update(piece)
        return digest.digest()

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        """Nobody else adds or removes a file meanwhile; `_bytes` is what there is, and what is said of it afterwards."""
        with self._mutex:
            is_first = self._lock_fd < 0
            if is_first:
                self._lock_fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                word = os.pread(self._lock_fd, _WORD.size, 0)
                os.pwrite(self._lock_fd, _WORD.pack(_UNKNOWN), 0)  # for others, if this process is killed now
                self._bytes = _WORD.unpack(word)[0] if len(word) == _WORD.size else _UNKNOWN
                if is_first or self._bytes == _UNKNOWN:
                    self._count()
                yield
                os.pwrite(self._lock_fd, _WORD.pack(self._bytes), 0)
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _count(self) -> None:
        """See what is there; what a process that died has not written to its end is removed."""
        self._bytes, found = 0, list[tuple[int, bytes]]()
        for entry in _entries(self._folder):
            with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
                about = entry.stat()
                if "." not in entry.name:
                    found.append((about.st_mtime_ns, bytes.fromhex(entry.name)))
                elif not _is_held(entry.path):
                    os.unlink(entry.path)
                    continue
                self._bytes += about.st_size
        self._oldest = collections.deque(sorted(found))

    def _make_room(self, size: int) -> list[bytes]:
        """Remove what was used least recently until so many bytes fit, or nothing is left to be removed."""
        removed: list[bytes] = []
        is_new = False
        while self._bytes + size > self._most:
            if not self._oldest:
                if is_new:
                    break
                self._count()
                is_new = True
                continue
            used, name = self._oldest.popleft()
            file = self._file(name)
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime_ns == used:
                    self._unlink(file)
                    removed.append(name)
        return removed

    def _begin(self, file: Path, size: int) -> tuple[Path, BinaryIO]:
        """A file beside its place, as large as it will be. It is locked as long as its writer lives."""
        file.parent.mkdir(mode=0o700, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}-{next(self._serial)}")
        opened = part.open("xb")
        opened.truncate(size)
        fcntl.flock(opened, fcntl.LOCK_EX)
        self._bytes += size
        return part, opened

    def _unlink(self, file: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            size = file.stat().st_size
            file.unlink()
            self._bytes -= size


def write_whole(path: Path, content: bytes) -> None:
    """Write one file, whole or not at all, also where several processes write it. Its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    partial.write_bytes(content)
    partial.replace(path)


def names_in(folder: Path) -> Iterator[bytes]:
    """The names of all contents in the folder of `KeptFiles`."""
    return (bytes.fromhex(entry.name) for entry in _entries(folder) if "." not in entry.name)


def _entries(folder: Path) -> "Iterator[os.DirEntry[str]]":
    for entry in os.scandir(folder):
        if entry.name != _LOCK:
            yield from os.scandir(entry)


def _use(file: Path | int) -> None:
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _is_held(path: str) -> bool:
    """Whether the process that has locked this file lives."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def roomiest(most: int, folders: Sequence[Path] | None = None) -> tuple[Path, int]:
    """The first folder in which so many bytes are at most half of what is free, else the one with the most room; and the bytes
    that may be taken there. `folders`: the host's shared memory, then its folder of temporary files, unless others are given."""
    rooms = list[tuple[int, Path]]()
    for folder in folders or (Path("/dev/shm"), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            about = os.statvfs(folder)
            room = about.f_bavail * about.f_frsize // 2 if os.access(folder, os.W_OK) else 0
            rooms.append((min(most, room), folder))
    room, folder = max(rooms, key=lambda each: each[0], default=(0, Path(tempfile.gettempdir())))
    return folder, room


@contextlib.contextmanager
def own_folder(parent: Path, prefix: str) -> Generator[Path]:
    """A new folder that is there meanwhile, and that only this user may enter. Those of this user with the same prefix whose
    processes have been killed are removed. Raises OSError: it cannot be made."""
    for other in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _locked(other):  # else it is somebody's
            shutil.rmtree(other, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    with _locked(made):
        folder = made.rename(parent / made.name[1:])  # nobody sees it before it is locked
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Nobody else has this folder meanwhile. Raises OSError: it is not this user's, or a process that lives has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
