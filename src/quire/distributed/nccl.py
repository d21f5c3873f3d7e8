"""Ranks on NVIDIA GPUs of one host: NCCL, and for small sums a kernel that reads the other GPUs' memory by itself.

Everything may be captured in CUDA graphs: nothing here allocates or waits after the constructor. Knows one device a rank.
"""

import torch
import torch.distributed as dist

from quire.distributed.peer_memory import PeerMemory
from quire.distributed.torch_group import TorchGroup
from quire.logger import init_logger

logger = init_logger(__name__)


class NcclGroup(TorchGroup):
    """One process a GPU.

    Args:
        index: of the rank's GPU, among those that are visible.
        uses_peer_memory: sums small tensors in one kernel where the GPUs can read one another's memory.
    """

    def __init__(self, rank: int, size: int, address: str, index: int, *, uses_peer_memory: bool = True) -> None:
        device = torch.device("cuda", index)
        super().__init__("nccl", rank, size, address, device)
        # The first use makes NCCL's connections and buffers: before anybody measures what memory is left.
        self._first_use(device)
        self.peer_memory: PeerMemory | None = None
        why = "disable_custom_all_reduce is set"
        if uses_peer_memory:
            self.peer_memory, why = PeerMemory.open(self, device)
        if self.peer_memory is None:
            logger.info("all sums go through NCCL: %s", why)
        else:
            logger.info("sums of up to %d KiB are one kernel's, larger ones NCCL's", self.peer_memory.max_bytes >> 10)

    def _first_use(self, device: torch.device) -> None:
        ones = torch.ones(1024, device=device)
        super().all_reduce(ones)
        gathered = torch.empty(self.size, 1024, device=device)
        self.all_gather(ones, gathered)
        torch.cuda.synchronize(device)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.peer_memory is not None and self.peer_memory.takes(tensor) and not self.is_silent:
            self.peer_memory.all_reduce(tensor)
        else:
            super().all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        if not self.is_silent:
            dist.all_gather_into_tensor(out, tensor, group=self.group)

    def shutdown(self) -> None:
        """Nothing is taken apart: NCCL would wait for the captured graphs that hold its kernels. The process's end frees all."""
        self.peer_memory = None
