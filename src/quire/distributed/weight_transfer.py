"""How a trainer's tensors reach an engine's ranks: a broadcast within a group of its own, or a file in shared memory.

Both sides are here: a trainer imports `TrainerGroup` and `shared_weights`. Knows tensors and names; knows nothing of models.
"""

import contextlib
import datetime
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quire.distributed.groups import open_group

SHARED_MEMORY = Path("/dev/shm")
"""The system's file system in memory."""
WAIT_S = 300.0
"""How long one side waits for the other."""


class TransferGroup:
    """A trainer (rank 0) and the ranks of engines. It is no group that `torch.distributed` knows: a process may be in others.

    Args:
        address, port: where the trainer waits for the others.
        rank, size: in this group.
        device: the tensors'; decides between its own library and gloo.

    Raises:
        RuntimeError: the others did not come in time.
    """

    def __init__(
        self, address: str, port: int, rank: int, size: int, device: torch.device, wait_s: float = WAIT_S
    ) -> None:
        wait = datetime.timedelta(seconds=wait_s)
        group: Any = dist
        store = group.TCPStore(address, port, size, rank == 0, wait)
        self._group: Any
        self._group, self._goes_through_host = open_group(store, rank, size, device, wait)
        self.device = device
        self._options: Any = group.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The trainer's tensor on every rank, in place. Raises RuntimeError: a rank has left, or does not answer in time."""
        sent = tensor.cpu() if self._goes_through_host else tensor
        self._group.broadcast([sent], self._options).wait()
        if sent is not tensor:
            tensor.copy_(sent)

    def receive(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor that the trainer sends."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.broadcast(tensor)
        return tensor

    def close(self) -> None:
        """Leave the group."""
        with contextlib.suppress(AttributeError, RuntimeError):
            self._group.abort()
        self._group = None


class TrainerGroup:
    """The trainer's side of a broadcast.

    Attributes:
        init_info: what `init_weight_transfer_engine` is to be called with, while `connect` waits in another thread.

    Args:
        num_ranks: of all engines together.
        address: this machine's, as the engines reach it.
        port: a free one; 0 lets the system choose.
    """

    def __init__(
        self, num_ranks: int, device: torch.device | str = "cpu", *, address: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._size, self._device = num_ranks + 1, torch.device(device)
        self._address, self._port = address, port or _free_port()
        self._group: TransferGroup | None = None
        self.init_info: dict[str, Any] = {
            "master_address": address,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._size,
        }

    def connect(self, wait_s: float = WAIT_S) -> None:
        """Wait for the engines' ranks. Raises RuntimeError: they did not come in time."""
        self._group = TransferGroup(self._address, self._port, 0, self._size, self._device, wait_s)

    @staticmethod
    def update_info(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What `update_weights` is to be called with, while `send` sends these tensors."""
        return {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send tensors, in their order. Raises RuntimeError: an engine has left, or does not answer in time."""
        if self._group is None:
            raise RuntimeError("connect() comes first")
        for tensor in tensors.values():
            self._group.broadcast(tensor.detach().to(self._device).contiguous())

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


@contextlib.contextmanager
def shared_weights(tensors: Mapping[str, torch.Tensor], folder: str | Path = SHARED_MEMORY) -> Iterator[dict[str, Any]]:
    """Tensors in shared memory, as long as the context lasts; gives what `update_weights` is to be called with.

    Args:
        folder: of a file system in memory, on the engine's machine.
    """
    from safetensors.torch import save_file

    place = Path(folder) / f"quire-weights-{secrets.token_hex(8)}"
    place.mkdir(mode=0o700)
    try:
        flat = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(flat, place / "model.safetensors")
        yield {"path": str(place)}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]
