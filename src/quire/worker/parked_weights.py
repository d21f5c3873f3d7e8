"""Weights that wait in host memory while an engine sleeps: their storage on the device is given back, every tensor object stays.

Knows objects and storages; knows nothing of models.
"""

import gc
import types
from collections.abc import Iterator
from typing import Any

import torch

from quire.distributed.communicator import Communicator
from quire.platforms.interface import DeviceRuntime, SleepPool

_LEAVES = (type, types.ModuleType, types.BuiltinFunctionType, Communicator, DeviceRuntime)
"""What a model refers to and does not own."""


class ParkedWeights:
    """Host copies of all that a model has on its device. `restore` brings them back; views and aliases stay what they are.

    Args:
        root: every tensor on the device that can be reached from it is taken.
    """

    def __init__(self, root: Any, runtime: DeviceRuntime) -> None:
        device = runtime.device()
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors_of(root)
            if tensor.device == device and tensor.untyped_storage().nbytes() and tensor.untyped_storage().resizable()
        }
        self._runtime = runtime
        self._parked: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        for storage in storages.values():
            copy = runtime.pinned(torch.empty(storage.nbytes(), dtype=torch.uint8))
            copy.copy_(_bytes_of(storage))
            self._parked.append((storage, copy))
        runtime.synchronize()
        for storage, _ in self._parked:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """What is parked."""
        return sum(copy.numel() for _, copy in self._parked)

    def restore(self) -> None:
        """Take memory of the device again, and fill it."""
        for storage, copy in self._parked:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self._runtime.synchronize()
        self._parked = []


class StoragePool(SleepPool):
    """Parks the weights of any device whose storages can be resized."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._parked: ParkedWeights | None = None

    def park(self, model: Any) -> None:
        if self._parked is None:
            self._parked = ParkedWeights(model, self._runtime)

    def restore(self) -> None:
        if self._parked is not None:
            self._parked.restore()
            self._parked = None

    def discard(self, tag: str) -> None:
        if tag == "weights":
            self._parked = None

    def usage(self) -> dict[str, int]:
        return {} if self._parked is None else {"weights": self._parked.num_bytes}


def pool_of(runtime: DeviceRuntime) -> SleepPool:
    """The device's own pool, or the usual one."""
    return runtime.sleep_pool() or (SleepPool() if runtime.is_host else StoragePool(runtime))


def tensors_of(root: Any) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from an object, through attributes, containers and closures."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if isinstance(found, _LEAVES) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            yield found
        elif isinstance(found, types.FunctionType):  # its globals are the whole program
            waiting += [found.__closure__, found.__defaults__, found.__dict__]
        else:
            waiting += gc.get_referents(found)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
