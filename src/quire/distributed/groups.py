"""Groups of processes that `torch.distributed` does not know, so that a process may be in several: one maker for all of them.

A device type's own library moves its tensors where there is one, else they go through the host's memory and gloo. Knows stores
and ranks; knows nothing of what is sent.
"""

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from quire import envs
from quire.distributed.torch_group import LAUNCHED, TIMEOUT
from quire.platforms.interface import is_host_memory

Library = Callable[[Any, int, int, datetime.timedelta], Any]


def _nccl(store: Any, rank: int, size: int, wait: datetime.timedelta) -> Any:
    group: Any = dist
    options = group.ProcessGroupNCCL.Options()
    options._timeout = wait
    return group.ProcessGroupNCCL(store, rank, size, options)


_LIBRARIES: dict[str, Library] = {"cuda": _nccl}
_LENIENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""With these variables torch's threads that watch NCCL end no process; a group reads them when it is made."""


def outliving_members() -> contextlib.AbstractContextManager[None]:
    """A group that is made within does not end this process when another member is lost: whoever waits for it gives up, and
    calls its `abort`."""
    return envs.lent_variables(_LENIENT)


def has_library(device: torch.device) -> bool:
    """Whether a device's tensors are sent by a library of its own."""
    return device.type in _LIBRARIES


def register_library(device_type: str, make: Library) -> None:
    """Have tensors of a device type sent by a library of its own; those of others go through the host's memory.

    Args:
        make: from (store, rank, size, longest wait) to one of torch's process groups.

    Raises:
        ValueError: the type has one.
    """
    if device_type in _LIBRARIES:
        raise ValueError(f"devices of type {device_type!r} have a library already")
    _LIBRARIES[device_type] = make


def open_group(store: Any, rank: int, size: int, device: torch.device, wait: datetime.timedelta) -> tuple[Any, bool]:
    """A group of torch's for a device's tensors, and whether these have to be brought to the host first."""
    group: Any = dist
    make = _LIBRARIES.get(device.type)
    return (make or group.ProcessGroupGloo)(store, rank, size, wait), make is None and not is_host_memory(device)


def open_store(address: str, *, is_host: bool) -> Any:
    """What members of a group find one another through: a file of this host, or a server that one of them is.

    Args:
        address: `file://PATH` or `tcp://HOST:PORT`. `LAUNCHED`: the launcher's, which all of its processes have.
    """
    stores: Any = dist
    if address == LAUNCHED:
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=LAUNCHED, timeout=TIMEOUT)
        return stores.distributed_c10d._get_default_store()
    if address.startswith("file://"):
        return stores.FileStore(address.removeprefix("file://"), -1)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return stores.TCPStore(host, int(port), None, is_host, wait_for_workers=False)
