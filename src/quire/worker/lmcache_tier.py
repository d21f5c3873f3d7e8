"""A tier behind the device's pages that is an LMCache server, for engines of several hosts. Knows names and bytes."""

import torch

from quire.config import EngineConfig
from quire.core.lmcache_client import LmcacheClient
from quire.platforms.interface import DeviceRuntime
from quire.worker.page_connector import PageTier


class LmcacheTier(PageTier):
    """Keys of `kv_connector_extra_config`: see `quire.core.lmcache_pages.LmcachePages`."""

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
