"""Pages for other engines that NIXL moves (https://github.com/ai-dynamo/nixl): over RDMA, shared memory, its backends.

Knows NIXL's agents. Its own thread would keep a core busy while nothing is moved, so both sides drive a transfer themselves.
"""

import contextlib
import threading
import time
import uuid
from typing import Any

import torch

from quire.config.kv_transfer import SETTING, KVTransferConfig
from quire.errors import refusing
from quire.worker.lent_tier import Lent, LentTier, import_library


class NixlTier(LentTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`, and `backends`, names of NIXL's (`["UCX"]`)."""

    KEYS = (*LentTier.KEYS, "backends")
    KIND = 2
    PROGRESS_S = 0.0005

    def open(self, transfer: KVTransferConfig, extra: dict[str, Any]) -> None:
        self._nixl = import_library("nixl._api", "nixl", "nixl")
        backends = extra.get("backends", ["UCX"])
        what = f"{SETTING}.kv_connector_extra_config.backends={backends!r} cannot be used by NIXL"
        with refusing(Exception, setting=SETTING, what=what):  # the library's exceptions have no common base
            settings = self._nixl.nixl_agent_config(
                backends=backends,
                enable_prog_thread=False,
                sync_mode=self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent = self._nixl.nixl_agent(uuid.uuid4().hex, settings)
            if missing := sorted(set(backends) - self._agent.backends.keys()):
                raise ValueError(f"there is no {missing[0]!r}; there are {', '.join(self._agent.get_plugin_list())}")
        self._others: dict[bytes, str] = {}
        self._acquainting = threading.Lock()

    def lend(self, memory: torch.Tensor) -> bytes:
        self._agent.register_memory(memory)
        return self._agent.get_agent_metadata()

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def read_lent(self, lent: Lent, into: torch.Tensor) -> None:
        try:
            here = self._agent.register_memory(into)
            try:
                self._read(lent, into)
            finally:
                self._agent.deregister_memory(here)
        except Exception as error:
            self._forget(lent.ticket)
            raise OSError(f"NIXL: {error}") from error

    def _read(self, lent: Lent, into: torch.Tensor) -> None:
        size = into.shape[1]
        source = self._agent.get_xfer_descs([(place, size, 0) for place in lent.places], "DRAM")
        target = self._agent.get_xfer_descs([(row.data_ptr(), size, 0) for row in into], "DRAM")
        handle = self._agent.initialize_xfer("READ", target, source, self._other(lent.ticket))
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(self.PROGRESS_S)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError("the transfer has failed")

    def _other(self, ticket: bytes) -> str:
        """The name of another engine's agent."""
        with self._acquainting:
            if ticket not in self._others:
                self._others[ticket] = self._agent.add_remote_agent(ticket)
            return self._others[ticket]

    def _forget(self, ticket: bytes) -> None:
        with self._acquainting, contextlib.suppress(Exception):
            self._agent.remove_remote_agent(self._others.pop(ticket))
