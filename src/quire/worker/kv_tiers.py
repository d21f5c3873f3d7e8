"""Tiers behind the device's pages: the host's memory, files that outlive the engine, and an LMCache server.

A file has one page of one worker (`quire.kept_files`). The first two are bounded; what was used least recently goes first. Knows
names and bytes.
"""

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING
from quire.core.kv_connector import folder_of
from quire.core.lmcache import LmcacheClient
from quire.errors import ConfigError
from quire.kept_files import KeptFiles
from quire.logger import init_logger
from quire.platforms.interface import DeviceRuntime
from quire.threads import begin_call
from quire.worker.page_connector import Pages, PageTier
from quire.worker.page_store import PageStore

logger = init_logger(__name__)

MAX_BYTES = {"memory": 4 << 30, "disk": 32 << 30, "device": 1 << 30}
"""What a tier of one engine may take, unless `max_bytes` says otherwise."""
BLOCK_BYTES = 64 << 20
"""Of the host's memory, that the device is shown at once."""


def _share(config: EngineConfig, tier: str, *known: str) -> int:
    """The bytes that this worker's part of a tier may take."""
    assert config.kv_transfer is not None
    most = config.kv_transfer.extra("max_bytes", *known).get("max_bytes", MAX_BYTES[tier])
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        message = f"{SETTING}.kv_connector_extra_config.max_bytes={most!r} must be a whole number above 0"
        raise ConfigError(message, setting=SETTING)
    return most // config.parallel.world_size


class PageRows:
    """Memory for pages, a row each. A row is used anew when nobody holds its tensor any more.

    Args:
        allocate: so many rows.
        most: rows that there may be.
        block: rows that are allocated together.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], most: int, block: int) -> None:
        self._allocate, self._left, self._block = allocate, most, block
        self._blocks, self._free = deque[torch.Tensor](), deque[torch.Tensor]()

    def fill(self) -> None:
        """Allocate all rows; those that are there may be taken meanwhile."""
        while (rows := min(self._block, self._left)) > 0:
            self._blocks.append(self._allocate(rows))
            self._left -= rows

    def close(self) -> None:
        """Allocate no more."""
        self._left = 0

    def take(self) -> torch.Tensor:
        """A row. Raises OSError: none is free."""
        if not self._free and self._blocks:
            self._free.extend(self._blocks.popleft())
        try:
            row = self._free.popleft()
        except IndexError:
            raise OSError("all memory for pages is in use, or not there yet") from None
        held = row[:]
        weakref.finalize(held, self._free.append, row).atexit = False
        return held


class MemoryTier(PageTier):
    """Pages in the host's memory. Keys of `kv_connector_extra_config`: `max_bytes`, and `KEYS` of what derives from it."""

    KEYS: tuple[str, ...] = ()
    KIND_OF_MEMORY = "memory"
    fills_first = False
    """Whether the engine starts when all memory for pages is there, rather than while it is made."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        self._most, self._kept, self._bytes = (
            _share(config, self.KIND_OF_MEMORY, *self.KEYS),
            OrderedDict[bytes, torch.Tensor](),
            0,
        )
        self._rows: PageRows | None = None
        super().__init__(config, runtime)

    def register_kv_caches(self, pages: PageStore) -> None:
        super().register_kv_caches(pages)
        if self._rows is None:
            self._rows = self.make_rows(pages.page_bytes, self._most // pages.page_bytes + 1)
            filling = begin_call(self._fill, "kv-rows")  # pinned memory takes a third of a second a GB
            if self.runtime.is_host or self.fills_first:
                filling.result()

    def _fill(self) -> None:
        assert self._rows is not None
        self.runtime.adopt_thread()
        try:
            self._rows.fill()
        except RuntimeError as error:
            logger.warning("The host has less memory for pages than max_bytes: %s", error)

    def make_rows(self, page_bytes: int, most: int) -> PageRows:
        """Memory for one page more than may be kept: a page is kept before the oldest one goes."""

        def allocate(rows: int) -> torch.Tensor:
            return self.runtime.host_empty((rows, page_bytes), torch.uint8)

        return PageRows(allocate, most, max(1, BLOCK_BYTES // page_bytes))

    def shutdown(self) -> None:
        if self._rows is not None:
            self._rows.close()
        super().shutdown()

    def read(self, name: bytes) -> torch.Tensor:
        with self._lock:
            self._kept.move_to_end(name)
            return self._kept[name]

    def gather(self, names: list[bytes]) -> Pages:
        return [self.read(name) for name in names]

    def bring(self, page: torch.Tensor) -> torch.Tensor:
        return page  # it is copied once, to where it is kept

    def copy_of(self, page: torch.Tensor) -> torch.Tensor:
        """A page's bytes where they are kept. Raises OSError: there is no room."""
        assert self._rows is not None
        return self._rows.take().copy_(page)

    def write(self, name: bytes, page: torch.Tensor) -> list[bytes]:
        removed: list[bytes] = []
        with self._lock:
            is_kept = name in self._kept
        row = None if is_kept else self.copy_of(page)
        with self._lock:
            if row is not None:
                self._kept[name] = row
                self._bytes += page.nbytes
            while self._bytes > self._most:
                gone, old = self._kept.popitem(last=False)
                self._bytes -= old.nbytes
                removed.append(gone)
        return removed


class DiskTier(PageTier):
    """Pages in files. Keys of `kv_connector_extra_config`: `path` (a folder of this machine), `max_bytes`."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        folder = folder_of(config, config.parallel.world_rank)
        self._files = KeptFiles(folder, _share(config, "disk", "path"), lasting=True)
        super().__init__(config, runtime)

    def read(self, name: bytes) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(self._files.read(name)), dtype=np.uint8))

    def write(self, name: bytes, page: torch.Tensor) -> list[bytes]:
        return self._files.write(name, [page.numpy().tobytes()])


class LmcacheTier(PageTier):
    """Keys of `kv_connector_extra_config`: see `quire.core.lmcache.LmcachePages`."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        self._reads, self._writes = LmcacheClient(config), LmcacheClient(config)
        super().__init__(config, runtime)

    def read(self, name: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._reads.get(name)), dtype=torch.uint8)

    def gather(self, names: list[bytes]) -> Pages:
        if (count := self._reads.count(names)) < len(names):
            raise KeyError(f"the LMCache server has {count} of {len(names)} pages")
        return super().gather(names)

    def write(self, name: bytes, page: torch.Tensor) -> list[bytes]:
        self._writes.put(name, page.numpy().data)
        return []
