"""Pages that an LMCache server keeps for engines of several hosts, as far as plans are concerned.

The server is asked in a thread how many pages of a request it has; until it has said so, workers try to fetch all of them. They
ask it the same first, so that of a request of which it has some pages, those are fetched when that is known. Knows names.
"""

import concurrent.futures
import hashlib
from collections.abc import Set

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.core.kv_connector import NamedPages, identity
from quire.core.lmcache_client import LmcacheClient
from quire.core.request_state import Request


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
