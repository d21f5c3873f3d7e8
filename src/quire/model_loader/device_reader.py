"""From safetensors files to a device: several threads read, and copies run beside them.

Bytes go from the file through a ring of staging buffers that the device reads itself, so that no more host memory than the
ring is used. Knows bytes, files and shapes; knows nothing of models.
"""

import dataclasses
import math
import os
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch

from quire.errors import ConfigError
from quire.model_loader.checkpoint import DTYPES
from quire.model_loader.safetensors_reader import SafetensorsReader
from quire.platforms.interface import DeviceEvent, UploadStream

PIECE_BYTES = 8 << 20
"""A read and a copy: large enough that neither its start nor Python's part of it counts (1 ms at 8 GB/s)."""
NUM_THREADS = 8
NUM_BUFFERS = 2 * NUM_THREADS
"""While a thread fills one buffer, its last one is on its way."""
AHEAD_BYTES = 1 << 30
"""Tensors that may wait on the device, in bytes, before the one that is asked for is used."""


class UploadedTensor:
    """Stretches of a tensor's first dimension, on the device; sliced as the whole tensor would be."""

    def __init__(self, stretches: Sequence[tuple[slice, torch.Tensor]]) -> None:
        self._stretches = stretches

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """The part that `index` (a tuple that begins with a slice, or () for one number) names.

        Raises:
            IndexError: it was not read.
        """
        if not index:  # one number
            return self._stretches[0][1]
        rows, *others = index
        for stretch, tensor in self._stretches:
            if stretch.start <= rows.start and rows.stop <= stretch.stop:
                return tensor[(slice(rows.start - stretch.start, rows.stop - stretch.start), *others)]
        raise IndexError(f"rows {rows.start} to {rows.stop} were not read")


@dataclasses.dataclass
class _Tensor:
    """A tensor on its way; `copies` end with the events of its copies to the device."""

    name: str
    stretches: list[tuple[slice, torch.Tensor]]
    num_bytes: int
    copies: list[Future[DeviceEvent]]


def upload_tensors(
    reader: SafetensorsReader, wanted: Mapping[str, list[slice]], uploads: UploadStream, device: torch.device
) -> Iterator[tuple[str, UploadedTensor]]:
    """(name, what was wanted of it, on the device) for every wanted tensor, in the order in which they lie on the disk.

    Args:
        wanted: by tensor name, the stretches of its first dimension to read.

    Raises:
        ConfigError: a file is shorter than its header says.
    """
    uploader = _Uploader(reader, uploads, device)
    try:
        names = sorted(wanted, key=lambda name: (reader.infos[name].file, reader.infos[name].offset))
        waiting: deque[_Tensor] = deque()
        ahead = 0
        for name in names:
            tensor = uploader.start(name, wanted[name])
            waiting.append(tensor)
            ahead += tensor.num_bytes
            while ahead > AHEAD_BYTES:
                ahead -= waiting[0].num_bytes
                yield uploader.finish(waiting.popleft())
        while waiting:
            yield uploader.finish(waiting.popleft())
    finally:
        uploader.close()


class _Uploader:
    """Threads that read pieces of files into staging buffers and copy these to the device."""

    def __init__(self, reader: SafetensorsReader, uploads: UploadStream, device: torch.device) -> None:
        self._reader, self._uploads, self._device = reader, uploads, device
        self._descriptors: dict[str, int] = {}
        self._free: queue.SimpleQueue[tuple[torch.Tensor, DeviceEvent | None]] = queue.SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._free.put((uploads.staging(PIECE_BYTES), None))
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights-read")

    def start(self, name: str, rows: list[slice]) -> _Tensor:
        """Start reading; memory on the device is taken now."""
        info = self._reader.infos[name]
        if info.file not in self._descriptors:
            self._descriptors[info.file] = os.open(self._reader.path / info.file, os.O_RDONLY)
        dtype, tail = DTYPES[info.dtype], info.shape[1:]
        row_bytes = math.prod(tail) * dtype.itemsize
        stretches: list[tuple[slice, torch.Tensor]] = []
        pieces: list[tuple[int, torch.Tensor]] = []
        for stretch in rows if info.shape else [slice(0, 1)]:
            count = stretch.stop - stretch.start
            target = torch.empty(count * row_bytes, dtype=torch.uint8, device=self._device)
            begin = info.offset + stretch.start * row_bytes
            pieces += [(begin + at, target[at : at + PIECE_BYTES]) for at in range(0, target.shape[0], PIECE_BYTES)]
            shape = (count, *tail) if info.shape else ()
            stretches.append((stretch, target.view(dtype).view(shape)))
        self._uploads.fence()
        copies = [self._threads.submit(self._copy, info.file, offset, target) for offset, target in pieces]
        return _Tensor(name, stretches, sum(target.shape[0] for _, target in pieces), copies)

    def finish(self, tensor: _Tensor) -> tuple[str, UploadedTensor]:
        """Wait until a tensor was sent; what the device does next comes after its arrival."""
        for copy in tensor.copies:
            self._uploads.join(copy.result())
        return tensor.name, UploadedTensor(tensor.stretches)

    def close(self) -> None:
        """End the threads, leave unread what was not asked for, and wait for every copy: staging memory must outlive them."""
        self._threads.shutdown(cancel_futures=True)
        for _ in range(NUM_BUFFERS):
            _, event = self._free.get()
            if event is not None:
                event.wait()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _copy(self, file: str, offset: int, target: torch.Tensor) -> DeviceEvent:
        buffer, event = self._free.get()
        try:
            if event is not None:
                event.wait()
                event = None
            source = buffer[: target.shape[0]]
            self._read(file, offset, memoryview(cast("Any", source.numpy())))
            event = self._uploads.submit(target, source)
            return event
        finally:
            self._free.put((buffer, event))

    def _read(self, file: str, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._descriptors[file], [into[done:]], offset + done)
            if not count:
                raise ConfigError(
                    f"{self._reader.path / file} ends at byte {offset + done}, before its tensors do; download it again",
                    setting="model",
                )
            done += count
