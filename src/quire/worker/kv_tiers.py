"""Tiers behind the device's pages: the host's memory, and files that outlive the engine.

A file has one page of one worker: a digest of the rest, then the page's bytes. It is written under another name and renamed, so
that it is whole or not there. Both tiers are bounded; what was used least recently goes first. Knows names and bytes.
"""

import contextlib
import hashlib
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING
from quire.core.kv_connector import folder_of
from quire.errors import ConfigError
from quire.platforms.interface import DeviceRuntime
from quire.worker.page_connector import PageTier

DIGEST = 16
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
        self._most, self._folder = _share(config, "disk", "path"), folder_of(config, config.parallel.world_rank)
        self._sizes, self._bytes = OrderedDict[bytes, int](), 0
        for _, name, size in sorted(self._scan()):
            self._sizes[name] = size
            self._bytes += size
        super().__init__(config, runtime)

    def _scan(self) -> list[tuple[float, bytes, int]]:
        """The files that are there: when they were used last, name, size. What was not written to its end is removed."""
        found: list[tuple[float, bytes, int]] = []
        for file in self._folder.glob("??/*"):
            with contextlib.suppress(OSError):  # another engine may have removed it
                if file.suffix:
                    file.unlink()
                else:
                    about = file.stat()
                    found.append((about.st_mtime, bytes.fromhex(file.name), about.st_size))
        return found

    def _file(self, name: bytes) -> Path:
        return self._folder / name[:1].hex() / name.hex()

    def read(self, name: bytes) -> torch.Tensor:
        file = self._file(name)
        try:
            data = file.read_bytes()
            if hashlib.blake2b(data[DIGEST:], digest_size=DIGEST, key=name).digest() != data[:DIGEST]:
                raise ValueError(f"{file} is damaged")
        except (OSError, ValueError):
            self._forget(name)
            raise
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):
            os.utime(file)
        return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)[DIGEST:])

    def write(self, name: bytes, page: torch.Tensor) -> list[bytes]:
        file, data = self._file(name), page.numpy().tobytes()
        if not file.exists():
            file.parent.mkdir(mode=0o700, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            try:
                with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as made:
                    made.write(hashlib.blake2b(data, digest_size=DIGEST, key=name).digest() + data)
                part.rename(file)
            except OSError:
                part.unlink(missing_ok=True)
                raise
        with self._lock:
            if name not in self._sizes:
                self._sizes[name] = len(data) + DIGEST
                self._bytes += len(data) + DIGEST
        return self._make_room()

    def _make_room(self) -> list[bytes]:
        removed: list[bytes] = []
        while self._bytes > self._most:
            with self._lock:
                oldest = next(iter(self._sizes))
            self._forget(oldest)
            removed.append(oldest)
        return removed

    def _forget(self, name: bytes) -> None:
        with self._lock:
            self._bytes -= self._sizes.pop(name, 0)
        self._file(name).unlink(missing_ok=True)
