"""Sums over GPUs that read one another's memory: one kernel, no ring, for tensors that are small enough.

Each rank copies its part into a buffer that the others have mapped, waits for their flags, and adds all parts up in the order of
ranks, so that every rank gets the same bits (the "one-shot" all-reduce of torch's symmetric memory; without multicast). Knows
buffers; knows nothing of models.
"""

from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from quire.distributed.communicator import Communicator

MAX_BYTES = {2: 256 << 10}
"""Up to where one kernel is used instead of NCCL, by the number of ranks; those that were not measured use NCCL. Two H200,
Llama-3.1-8B: a step of 1 request takes 2.709 ms instead of 2.724, of 32 (256 KiB a sum) 3.709 instead of 3.771. Alone, one sum
after the other, NCCL is faster by 0.1 to 0.9 us up to here, and by 1 us at 512 KiB and 1 MiB (`tools/gpu/tp.py`)."""
DTYPES = (torch.bfloat16, torch.float32)
"""What torch's kernel adds."""
_ALIGNMENT = 16


class PeerMemory:
    """A buffer on each GPU that all of them can read.

    Attributes:
        max_bytes: the largest tensor that it sums.
    """

    def __init__(self, size: int, device: torch.device, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        group = dist.group.WORLD
        assert group is not None
        self._group_name: Any = group.group_name
        self._buffer = symmetric_memory.empty(max_bytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._buffer, group)
        self._views = {dtype: self._buffer.view(dtype) for dtype in DTYPES}
        self._check(size, device)

    @classmethod
    def open(cls, ranks: Communicator, device: torch.device) -> "tuple[Self | None, str]":
        """The buffer where all ranks have one, else None and why."""
        max_bytes = MAX_BYTES.get(ranks.size, 0)
        if not max_bytes:
            return None, f"one kernel for {ranks.size} ranks was not measured"
        found, why = None, "another rank could not map the others' memory"
        try:
            found = cls(ranks.size, device, max_bytes)
        except (RuntimeError, NotImplementedError) as error:
            why = f"the GPUs cannot read one another's memory ({str(error).splitlines()[0]})"
        # All ranks or none: they would wait for one another in different kernels.
        failures = torch.tensor([float(found is None)], device=device)
        dist.all_reduce(failures)
        return (found, "") if failures.item() == 0 else (None, why)

    def _check(self, size: int, device: torch.device) -> None:
        for dtype in DTYPES:
            ones = torch.ones(512, dtype=dtype, device=device)
            self.all_reduce(ones)
            if not bool((ones == size).all()):
                raise RuntimeError("a first sum was wrong")

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of a kind and size that is summed here."""
        num_bytes = tensor.numel() * tensor.element_size()
        return (
            num_bytes <= self.max_bytes
            and tensor.dtype in self._views
            and num_bytes % _ALIGNMENT == 0
            and tensor.data_ptr() % _ALIGNMENT == 0
            and tensor.is_contiguous()
        )

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place."""
        flat, buffer = tensor.view(-1), self._views[tensor.dtype]
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer[: flat.shape[0]], flat, "sum", self._group_name, flat)
