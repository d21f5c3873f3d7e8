"""Pages for other engines that Mooncake's transfer engine moves (https://github.com/kvcache-ai/Mooncake): over RDMA or TCP.

Knows its engine and its words for a memory: the address of the engine that lends it. The two talk to each other without a
metadata server.
"""

from typing import Any

import torch

from quire.config.kv_transfer import SETTING, KVTransferConfig
from quire.errors import ConfigError
from quire.worker.lent_tier import Lent, LentTier, import_library


class MooncakeTier(LentTier):
    """Keys of `kv_connector_extra_config`: those of `tcp`, and `protocol` of the transfer engine (`rdma`)."""

    KEYS = (*LentTier.KEYS, "protocol")
    KIND = 3

    def open(self, transfer: KVTransferConfig, extra: dict[str, Any]) -> None:
        protocol = extra.get("protocol", "rdma")
        library = import_library("mooncake.engine", "mooncake", "mooncake")
        self._engine = library.TransferEngine()
        if not isinstance(protocol, str) or self._engine.initialize(transfer.kv_ip, "P2PHANDSHAKE", protocol, ""):
            text = f"{SETTING}.kv_connector_extra_config.protocol={protocol!r} cannot be used by Mooncake at {transfer.kv_ip}"
            raise ConfigError(text, setting=SETTING)
        self._address = f"{transfer.kv_ip}:{self._engine.get_rpc_port()}"

    def lend(self, memory: torch.Tensor) -> bytes:
        self._register(memory)
        return self._address.encode()

    def read_lent(self, lent: Lent, into: torch.Tensor) -> None:
        self._register(into)
        try:
            rows = [row.data_ptr() for row in into]
            sizes = [into.shape[1]] * len(rows)
            if self._engine.batch_transfer_sync_read(lent.ticket.decode(errors="replace"), rows, lent.places, sizes):
                raise OSError("Mooncake: the transfer has failed")
        finally:
            self._engine.unregister_memory(into.data_ptr())

    def _register(self, memory: torch.Tensor) -> None:
        if self._engine.register_memory(memory.data_ptr(), memory.nbytes):
            raise OSError(f"Mooncake cannot use {memory.nbytes} bytes of memory")
