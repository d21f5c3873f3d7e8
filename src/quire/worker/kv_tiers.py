"""Tiers behind the device's pages: the host's memory, files that outlive the engine, and an LMCache server.

A file has one page of one worker (`quire.kept_files`). The first two are bounded; what was used least recently goes first. Knows
names and bytes.
"""

from collections import OrderedDict

import numpy as np
import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING
from quire.core.kv_connector import folder_of
from quire.core.lmcache import LmcacheClient
from quire.errors import ConfigError
from quire.kept_files import KeptFiles
from quire.platforms.interface import DeviceRuntime
from quire.worker.page_connector import PageTier

MAX_BYTES = {"memory": 4 << 30, "disk": 32 << 30, "device": 1 << 30}
"""What a tier of one engine may take, unless `max_bytes` says otherwise."""


def _share(config: EngineConfig, tier: str, *known: str) -> int:
    """The bytes that this worker's part of a tier may take."""
    assert config.kv_transfer is not None
    most = config.kv_transfer.extra("max_bytes", *known).get("max_bytes", MAX_BYTES[tier])
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        message = f"{SETTING}.kv_connector_extra_config.max_bytes={most!r} must be a whole number above 0"
        raise ConfigError(message, setting=SETTING)
    return most // config.parallel.world_size


class MemoryTier(PageTier):
    """Pages in the host's memory. Keys of `kv_connector_extra_config`: `max_bytes`, and `KEYS` of what derives from it."""

    KEYS: tuple[str, ...] = ()
    KIND_OF_MEMORY = "memory"

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        self._most, self._kept, self._bytes = (
            _share(config, self.KIND_OF_MEMORY, *self.KEYS),
            OrderedDict[bytes, torch.Tensor](),
            0,
        )
        super().__init__(config, runtime)

    def read(self, name: bytes) -> torch.Tensor:
        with self._lock:
            self._kept.move_to_end(name)
            return self._kept[name]

    def copy_of(self, page: torch.Tensor) -> torch.Tensor:
        """A page's bytes where they are kept. Raises OSError: there is no room."""
        return page.clone()

    def write(self, name: bytes, page: torch.Tensor) -> list[bytes]:
        removed: list[bytes] = []
        with self._lock:
            if name not in self._kept:
                self._kept[name] = self.copy_of(page)
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

    def gather(self, names: list[bytes]) -> torch.Tensor:
        if (count := self._reads.count(names)) < len(names):
            raise KeyError(f"the LMCache server has {count} of {len(names)} pages")
        return super().gather(names)

    def write(self, name: bytes, page: torch.Tensor) -> list[bytes]:
        self._writes.put(name, page.numpy().data)
        return []
