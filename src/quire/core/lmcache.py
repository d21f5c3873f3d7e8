"""Pages that an LMCache server keeps for engines of several hosts, as far as plans are concerned, and how the server is asked.

The server (https://github.com/LMCache/LMCache, `lmcache_server HOST PORT`) is asked in a thread how many pages of a request it
has; until it has said so, workers try to fetch all of them. They ask it the same first, so that of a request of which it has some
pages, those are fetched when that is known. Its messages are structs in the host's byte order. A key is a text whose parts
LMCache names; a page has its name for the hash and its bytes as a binary object. Knows names and bytes; imports no torch.
"""

import concurrent.futures
import hashlib
import io
import socket
import struct
import threading
import urllib.parse
from collections.abc import Sequence, Set

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.config.kv_transfer import SETTING
from quire.core.kv_connector import NamedPages, identity
from quire.core.request_state import Request
from quire.errors import ConfigError

KEYS = ("remote_url", "secret")
_ASKED = struct.Struct("=9i150s")
"""The command; bytes that follow, their format, type and place; four sizes of a tensor; the key, filled up with spaces."""
_ANSWERED = struct.Struct("=9i")
"""200 or another code; bytes that follow, and what else is known of them."""
_PUT, _GET, _EXISTS = 1, 2, 3
_BINARY, _BYTE = 4, 6
_DONE = 200
TIMEOUT_S = 5.0


class LmcacheClient:
    """One connection, which is made when it is needed; any thread may use it. Methods raise OSError: the server is not there."""

    def __init__(self, config: EngineConfig) -> None:
        transfer, parallel = config.kv_transfer, config.parallel
        assert transfer is not None
        url = transfer.extra(*KEYS).get("remote_url")
        place = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        if place.scheme != "lm" or not place.hostname or not place.port:
            message = (
                f"{SETTING}.kv_connector_extra_config.remote_url={url!r} must be lm://HOST:PORT of an LMCache server"
            )
            raise ConfigError(message, setting=SETTING)
        self._place = place.hostname, place.port
        self._key = f"quire@{parallel.world_size}@{parallel.world_rank}@%s@uint8"
        self._lock = threading.Lock()
        self._stream: io.BufferedRWPair | None = None

    def count(self, names: Sequence[bytes]) -> int:
        """How many of these it has, from the first one on: pages of a prompt are kept in their order."""
        low, high, middle = 0, len(names), len(names)
        while low < high:
            low, high = (middle, high) if self._ask(_EXISTS, names[middle - 1]) is not None else (low, middle - 1)
            middle = (low + high + 1) // 2
        return low

    def get(self, name: bytes) -> bytes:
        """A page. Raises KeyError: it is not there."""
        page = self._ask(_GET, name)
        if page is None:
            raise KeyError("the LMCache server has it no more")
        return page

    def put(self, name: bytes, page: memoryview) -> None:
        """Keep a page, unless it is there."""
        if self._ask(_EXISTS, name) is None:
            self._ask(_PUT, name, page)

    def _ask(self, command: int, name: bytes, page: memoryview | None = None) -> bytes | None:
        size, key = 0 if page is None else page.nbytes, (self._key % name.hex()).encode().ljust(150)
        with self._lock:
            try:
                self._stream = self._stream or self._connect()
                self._stream.write(_ASKED.pack(command, size, _BINARY, _BYTE, 0, size, 0, 0, 0, key))
                self._stream.write(page or b"")
                self._stream.flush()
                if command == _PUT:
                    return None
                code, length, *_ = _ANSWERED.unpack(self._read(self._stream, _ANSWERED.size))
                return self._read(self._stream, length) if code == _DONE else None
            except OSError:
                self._stream = None
                raise

    def _connect(self) -> io.BufferedRWPair:
        server = socket.create_connection(self._place, TIMEOUT_S)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # nothing answers a page that is kept
        return server.makefile("rwb")

    @staticmethod
    def _read(stream: io.BufferedRWPair, size: int) -> bytes:
        data = stream.read(size)
        if len(data) < size:
            raise ConnectionError(f"the LMCache server has ended after {len(data)} of {size} bytes")
        return data


class LmcachePages(NamedPages):
    """Keys of `kv_connector_extra_config`: `remote_url`, `lm://HOST:PORT`; `secret`, without which nobody can make the names."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheConfig) -> None:
        super().__init__(config, kv_cache)
        self._client = LmcacheClient(config)
        self._asking = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kv-ask")
        self._counts: dict[str, concurrent.futures.Future[int]] = {}

    def name_key(self) -> bytes:
        assert self.config.kv_transfer is not None
        secret = str(self.config.kv_transfer.kv_connector_extra_config.get("secret", ""))
        text = f"{identity(self.config, across_hosts=True)} {self.config.kv_transfer.engine_id} {secret}"
        return hashlib.blake2b(text.encode(), digest_size=32).digest()

    def names_there(self, request: Request) -> Set[bytes]:
        limit = (len(request.token_ids) - 1) // self._size
        names = self._name(request, limit)[:limit]
        count = self._counts.get(request.request_id)
        if count is None:
            count = self._counts[request.request_id] = self._asking.submit(self._count, names)
        return set(names[: count.result()] if count.done() else names)

    def _count(self, names: list[bytes]) -> int:
        try:
            return self._client.count(names)
        except OSError:
            return 0

    def fetched(self, request: Request, problem: str | None) -> None:
        count = self._counts.get(request.request_id)
        start, end = self._wanted.get(request.request_id, (0, 0))
        if problem and count and count.done() and start < count.result() < end:
            del self._wanted[request.request_id]  # it has some: those are asked for now
        else:
            super().fetched(request, problem)

    def request_finished(self, request: Request, block_ids: list[list[int]]) -> None:
        super().request_finished(request, block_ids)
        self._counts.pop(request.request_id, None)
