"""Which network device ranks use, and where they can meet: on one host the loopback device, else one that other hosts reach."""

import contextlib
import dataclasses
import fcntl
import socket
import sys

from quire.config import EngineConfig
from quire.platforms import current_platform
from quire.platforms.interface import WorkerProcess

_GET_ADDRESS = 0x8915
"""`SIOCGIFADDR` of Linux."""


def rank_process(config: EngineConfig, rank: int) -> WorkerProcess:
    """How a rank's process starts. One that shares experts with other hosts' is to be reached by these."""
    process, copies = current_platform(config.device.device).worker_process(config, rank), config.parallel.sharing
    return beyond_host(process, copies.address) if copies is not None and copies.address else process


def beyond_host(process: WorkerProcess, address: str | None = None) -> WorkerProcess:
    """How a rank starts whose group spans hosts: not kept to the loopback device, but to the one that has an address."""
    suffix = "_SOCKET_IFNAME"
    own = {name: value for name, value in process.environment.items() if not name.endswith(suffix)}
    if (interface := _interface_of(address)) is not None:
        own |= {f"{library}{suffix}": interface for library in ("GLOO", "NCCL")}
    return dataclasses.replace(process, environment=own)


def _interface_of(address: str | None) -> str | None:
    """The name of the network interface that has an IPv4 address, where the system tells it (Linux)."""
    if address is None or sys.platform != "linux":
        return None
    packed = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(asked, _GET_ADDRESS, name.encode().ljust(256, b"\0"))
                if found[20:24] == packed:
                    return name
    return None


def free_place(address: str) -> str:
    """Where ranks can meet: a port of this host that is free."""
    with socket.socket() as found:
        found.bind((address, 0))
        return f"tcp://{address}:{found.getsockname()[1]}"
