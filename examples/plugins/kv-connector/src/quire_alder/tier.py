"""Pages that the device's cache has lost, compressed in the host's memory.

The scheduler's half is Quire's own: it names pages after their tokens. For another one derive from `KVConnectorScheduler`.
"""

import zlib
from collections import OrderedDict

import numpy as np
import torch

from quire.config import EngineConfig
from quire.platforms.interface import DeviceRuntime
from quire.worker.page_connector import PageTier


class AlderTier(PageTier):
    """At most `max_pages` pages (a key of `kv_connector_extra_config`); the oldest go first."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        assert config.kv_transfer is not None
        self._most = config.kv_transfer.extra("max_pages").get("max_pages", 1000)
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()
        super().__init__(config, runtime)

    def read(self, name: bytes) -> torch.Tensor:
        """A page's bytes; a KeyError where it is not there: then it is computed."""
        return torch.from_numpy(np.frombuffer(bytearray(zlib.decompress(self._pages[name])), dtype=np.uint8))

    def write(self, name: bytes, page: torch.Tensor) -> list[bytes]:
        """Keep a page; the names that had to go."""
        self._pages.setdefault(name, zlib.compress(page.numpy().tobytes(), 1))
        return [self._pages.popitem(last=False)[0] for _ in range(len(self._pages) - self._most)]
