"""KV connectors, as far as a worker is concerned: its pages come from elsewhere before a step's layers, and go there behind them.

The method names are vLLM's; since a step may be one recorded unit, all layers' pages come before its first layer, and go behind
its last one. Files and networks are used beside the steps, in threads of their own. Knows pages as bytes; knows nothing of
requests' tokens.
"""

import abc
import atexit
import concurrent.futures
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.codec import convert
from quire.config import EngineConfig
from quire.core.kv_connector import News, Transfers
from quire.layers.interface import CausalLM
from quire.logger import init_logger
from quire.platforms.interface import DeviceEvent, DeviceRuntime, is_host_memory
from quire.worker.page_store import PageStore

logger = init_logger(__name__)

MOST_UNSAVED = 1 << 30
"""Bytes of the device's memory that wait to be saved; pages beyond it are not saved."""
PAGE_READERS = 8
"""Threads that read pages of requests, one page each."""

Pages = torch.Tensor | list[torch.Tensor]
"""Several pages' bytes: [pages, page bytes], or one tensor each."""


class KVConnectorWorker(abc.ABC):
    """The half in a worker. Called in the thread that submits steps, except for what `fetch` begins.

    Args:
        config: its parallel part has this worker's rank and stage.
        runtime: the device.
    """

    device_bytes = 0
    """Of the device's memory that this half takes, beside the cache's."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        self.config, self.runtime = config, runtime

    def see_model(self, model: CausalLM) -> None:
        """The model was loaded (again, after a sleep)."""

    def register_kv_caches(self, pages: PageStore) -> None:
        """The pages were allocated (again, after a sleep)."""
        self.pages = pages

    def fetch(self, request_id: str, names: list[bytes]) -> "concurrent.futures.Future[None]":
        """Begin to bring these to the host; the future ends when they are there, or with why they cannot be had."""
        raise NotImplementedError(f"{type(self).__name__} has no pages")

    @abc.abstractmethod
    def bind_connector_metadata(self, meta: Any) -> None:
        """What the scheduler's half says of the step that comes."""

    def start_load_kv(self) -> None:
        """Submit the copies into pages that the step reads."""

    @abc.abstractmethod
    def wait_for_save(self) -> None:
        """Submit copies of what is to be saved: later steps may write these pages anew."""

    def get_finished(self, step_id: int) -> Any:
        """What the scheduler's half is told with this step's result, as plain data or a msgspec struct; None: nothing."""
        return None

    def shutdown(self) -> None:
        """The engine ends: save what waits, and leave. May be called twice."""


class PageTier(KVConnectorWorker):
    """Keeps whole pages under names, for `quire.core.kv_connector.NamedPages`. A tier says how one is read and written. Both
    are called in threads of their own, `write` always in the same one."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        super().__init__(config, runtime)
        self._transfers = Transfers()
        self._lock = threading.Lock()
        self._fetched: dict[str, Pages] = {}
        self._fetching: set[str] = set()
        self._released: set[str] = set()
        self._news = News()
        self.most_unsaved, self._unsaved = MOST_UNSAVED, 0
        self._readers = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="kv-fetch")
        self._page_readers = concurrent.futures.ThreadPoolExecutor(PAGE_READERS, thread_name_prefix="kv-read")
        self._to_save: queue.SimpleQueue[tuple[DeviceEvent, list[bytes], Pages] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._save, name="kv-save", daemon=True)
        self._writer.start()
        atexit.register(self.shutdown)  # a program that ends without ending its engine has its pages saved, too

    @abc.abstractmethod
    def read(self, name: bytes) -> torch.Tensor:
        """A page's bytes on the host; from several threads. Raises KeyError, OSError or ValueError: it is not there, or not
        whole."""

    @abc.abstractmethod
    def write(self, name: bytes, page: torch.Tensor) -> list[bytes]:
        """Keep a page, unless it is there already; the names that had to go. Raises OSError."""

    def gather(self, names: list[bytes]) -> Pages:
        """Several pages' bytes; raises as `read`. Those that lie in memory from which the device copies by itself are one tensor
        each, which nobody changes while it is held."""
        pages = self.runtime.host_empty((len(names), self.pages.page_bytes), torch.uint8)
        for _ in self._page_readers.map(self._read_into, pages, names):
            pass
        return pages

    def _read_into(self, row: torch.Tensor, name: bytes) -> None:
        page = self.read(name)
        if page.nbytes != row.nbytes:
            raise ValueError(f"pages have {page.nbytes} bytes, not {row.nbytes}")
        row.copy_(page)

    def bring(self, page: torch.Tensor) -> torch.Tensor:
        """A page where `write` takes it from. Called in the writer's thread."""
        return page.cpu()

    def will_save(self, names: Sequence[bytes]) -> None:
        """These pages are on their way to the host."""

    def was_saved(self, name: bytes) -> None:
        """One of them was kept, or could not be."""

    def fetch(self, request_id: str, names: list[bytes]) -> "concurrent.futures.Future[None]":
        with self._lock:
            self._fetching.add(request_id)
        return self._readers.submit(self._fetch, request_id, names)

    def _fetch(self, request_id: str, names: list[bytes]) -> None:
        pages: Pages | None = None
        try:
            pages = self.gather(names)
            if isinstance(pages, torch.Tensor) and is_host_memory(pages.device):
                pages = self.runtime.pinned(pages)
            if pages[0].nbytes != self.pages.page_bytes:
                raise ValueError(f"pages have {pages[0].nbytes} bytes, not {self.pages.page_bytes}")
        finally:
            with self._lock:
                self._fetching.discard(request_id)
                if pages is not None and request_id not in self._released:
                    self._fetched[request_id] = pages
                self._released.discard(request_id)

    def bind_connector_metadata(self, meta: Any) -> None:
        self._transfers = meta if isinstance(meta, Transfers) else convert(meta, Transfers)

    def start_load_kv(self) -> None:
        with self._lock:
            for request_id in self._transfers.released:
                self._fetched.pop(request_id, None)
                if request_id in self._fetching:
                    self._released.add(request_id)
            loads = [(load, self._fetched.pop(load.request_id)) for load in self._transfers.loads]
        for load, pages in loads:
            here = self._arrive(pages[load.skip : load.skip + len(load.pages)])
            self.runtime.reads(here)
            self.pages.write(self._index(load.pages), here)

    def _arrive(self, pages: Pages) -> torch.Tensor:
        """Submit the copy of pages to the device."""
        if isinstance(pages, torch.Tensor):
            return pages.to(self.runtime.device(), non_blocking=True)
        here = torch.empty((len(pages), self.pages.page_bytes), dtype=torch.uint8, device=self.runtime.device())
        for row, page in zip(here, pages, strict=True):
            row.copy_(page, non_blocking=True)
        event = self.runtime.event()
        event.record()
        self._to_save.put((event, [], pages))  # the writer's thread holds them as long as they are copied
        return here

    def _index(self, pages: list[int]) -> torch.Tensor:
        return self.runtime.upload(np.array(pages))

    def wait_for_save(self) -> None:
        names, numbers = self._transfers.save_names, self._transfers.save_pages
        self._transfers = Transfers()
        with self._lock:
            room = (self.most_unsaved - self._unsaved) // self.pages.page_bytes
            names, numbers = names[:room], numbers[:room]
            self._unsaved += len(names) * self.pages.page_bytes
        if not names:
            return
        self.will_save(names)
        pages = self.pages.read(self._index(numbers))
        event = self.runtime.event()
        event.record()
        self._to_save.put((event, names, pages))

    def _save(self) -> None:
        """The writer's thread."""
        self.runtime.adopt_thread()
        with self.runtime.beside_steps():
            while (entry := self._to_save.get()) is not None:
                event, names, pages = entry
                event.wait()
                for name, page in zip(names, pages, strict=False):  # those that were copied to the device have no names
                    self._save_one(name, page)
                    self.was_saved(name)
                with self._lock:
                    self._unsaved -= len(names) * self.pages.page_bytes

    def _save_one(self, name: bytes, page: torch.Tensor) -> None:
        try:
            removed = self.write(name, self.bring(page))
        except OSError as error:
            logger.warning_once("A page could not be saved: %s", error)
            return
        with self._lock:
            self._news.added.append(name)
            self._news.removed += removed

    def get_finished(self, step_id: int) -> News | None:
        with self._lock:
            news, self._news = self._news, News()
        return news if news.added or news.removed else None

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        for readers in (self._readers, self._page_readers):
            readers.shutdown(wait=False, cancel_futures=True)
        self._to_save.put(None)
        self._writer.join()
