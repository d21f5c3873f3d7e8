"""Pages for other engines that lie in one piece of memory, which is taken when the engine starts.

A row has one page, and is used anew when nobody keeps or sends it any more. Knows memory; knows nothing of how rows travel.
"""

import abc
import weakref
from collections import deque

import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING
from quire.errors import ConfigError
from quire.platforms.interface import DeviceRuntime
from quire.worker.page_store import PageStore
from quire.worker.tcp_tier import TcpTier


class RowTier(TcpTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`.

    Attributes:
        ticket: what others are told of the memory.
    """

    place = torch.device("cpu")
    """Where the memory is."""
    KIND: int
    """Of an answer whose pages travel by this tier's means."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        super().__init__(config, runtime)
        self._rows: torch.Tensor | None = None
        self._free = deque[int]()
        self.ticket = b""

    @abc.abstractmethod
    def lend(self, memory: torch.Tensor) -> bytes:
        """Let others have what is in this memory until the engine ends; the ticket with which they do."""

    def register_kv_caches(self, pages: PageStore) -> None:
        super().register_kv_caches(pages)
        transfer = self.config.kv_transfer
        if self._rows is None and transfer is not None and transfer.saves:
            count = self._most // pages.page_bytes + 1  # a page is kept before the oldest one goes
            size = count * pages.page_bytes
            try:
                self._rows = torch.empty((count, pages.page_bytes), dtype=torch.uint8, device=self.place)
                self.ticket = self.lend(self._rows)
            except Exception as error:  # the libraries' exceptions have no common base
                text = f"{size >> 20} MiB of memory cannot be lent to others ({error}): lower max_bytes, or raise "
                raise ConfigError(f"{SETTING}: {text}the limit of locked memory", setting=SETTING) from error
            self._free.extend(range(count))

    def copy_of(self, page: torch.Tensor) -> torch.Tensor:
        if self._rows is None or not self._free:
            raise OSError("all memory for pages is being read by others")
        number = self._free.popleft()
        row = self._rows[number].copy_(page)
        weakref.finalize(row, self._free.append, number).atexit = False  # nobody keeps or sends it any more
        return row
