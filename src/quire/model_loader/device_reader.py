"""From safetensors files to a device: several threads read, and copies run beside them.

Bytes go from the file through a ring of staging buffers that the device reads itself, so that no more host memory than the
ring is used. Knows bytes, files and shapes; knows nothing of models.
"""

import dataclasses
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from quire.errors import ConfigError
from quire.model_loader.safetensors_reader import SafetensorsReader, TensorInfo
from quire.platforms.interface import DeviceEvent, UploadStream

PIECE_BYTES = 8 << 20
"""A read and a copy: large enough that neither its start nor Python's part of it counts (1 ms at 8 GB/s)."""
NUM_THREADS = 8
NUM_BUFFERS = 2 * NUM_THREADS
"""While a thread fills one buffer, its last one is on its way."""
AHEAD_BYTES = 1 << 30
"""Tensors that may wait on the device, in bytes, before the one that is asked for is used."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of number types."""


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
class _Piece:
    """Bytes of a file, and where they go."""

    file: str
    offset: int
    target: torch.Tensor
    owner: "_Tensor"


@dataclasses.dataclass
class _Tensor:
    """A tensor on its way. `last` is the event of its last copy once `is_there` is set."""

    name: str
    stretches: list[tuple[slice, torch.Tensor]]
    num_bytes: int
    missing: int = 0
    events: list[DeviceEvent] = dataclasses.field(default_factory=list)
    is_there: threading.Event = dataclasses.field(default_factory=threading.Event)


def upload_tensors(
    reader: SafetensorsReader, wanted: Mapping[str, list[slice]], uploads: UploadStream, device: torch.device
) -> Iterator[tuple[str, UploadedTensor]]:
    """(name, what was wanted of it, on the device) for every wanted tensor, in the order in which they lie on the disk.

    Args:
        wanted: by tensor name, the stretches of its first dimension to read.

    Raises:
        ConfigError: a file is shorter than its header says.
    """
    pool = _ReaderPool(reader, uploads)
    try:
        names = sorted(wanted, key=lambda name: (reader.infos[name].file, reader.infos[name].offset))
        waiting: deque[_Tensor] = deque()
        ahead = 0
        for name in names:
            tensor = pool.submit(name, reader.infos[name], wanted[name], device)
            waiting.append(tensor)
            ahead += tensor.num_bytes
            while ahead > AHEAD_BYTES:
                ahead -= waiting[0].num_bytes
                yield pool.take(waiting.popleft())
        while waiting:
            yield pool.take(waiting.popleft())
    finally:
        pool.close()


class _ReaderPool:
    """Threads that read pieces into staging buffers and send them on."""

    def __init__(self, reader: SafetensorsReader, uploads: UploadStream) -> None:
        self._uploads = uploads
        self._files = _OpenFiles(reader)
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[tuple[torch.Tensor, memoryview, DeviceEvent | None]] = queue.SimpleQueue()
        for _ in range(NUM_BUFFERS):
            buffer = uploads.staging(PIECE_BYTES)
            self._free.put((buffer, memoryview(cast("Any", buffer.numpy())), None))
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"weights-{i}", daemon=True) for i in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, name: str, info: TensorInfo, rows: list[slice], device: torch.device) -> _Tensor:
        """Start reading; memory on the device is taken now."""
        dtype, tail = DTYPES[info.dtype], info.shape[1:]
        row_bytes = math.prod(tail) * dtype.itemsize
        tensor = _Tensor(name, [], 0)
        pieces: list[_Piece] = []
        for stretch in rows if info.shape else [slice(0, 1)]:
            count = stretch.stop - stretch.start
            target = torch.empty(count * row_bytes, dtype=torch.uint8, device=device)
            begin = self._files.start_of(info.file) + info.offset + stretch.start * row_bytes
            pieces += [
                _Piece(info.file, begin + at, target[at : at + PIECE_BYTES], tensor)
                for at in range(0, target.shape[0], PIECE_BYTES)
            ]
            shape = (count, *tail) if info.shape else ()
            tensor.stretches.append((stretch, target.view(dtype).view(shape)))
            tensor.num_bytes += target.shape[0]
        tensor.missing = len(pieces)
        if not pieces:
            tensor.is_there.set()
        self._uploads.fence()
        for piece in pieces:
            self._pieces.put(piece)
        return tensor

    def take(self, tensor: _Tensor) -> tuple[str, UploadedTensor]:
        """Wait until a tensor was sent; what the device does next comes after its arrival."""
        tensor.is_there.wait()
        if self._error is not None:
            raise self._error
        for event in tensor.events:
            self._uploads.join(event)
        return tensor.name, UploadedTensor(tensor.stretches)

    def close(self) -> None:
        """End the threads, leave unread what nobody took, and wait for every copy: staging memory must outlive them."""
        self._error = self._error or RuntimeError("closed")
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()
        for _ in range(NUM_BUFFERS):
            _, _, event = self._free.get()
            if event is not None:
                event.wait()
        self._files.close()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            buffer, view, event = self._free.get()
            sent: DeviceEvent | None = None
            try:
                if self._error is None:
                    if event is not None:
                        event.wait()
                    count = piece.target.shape[0]
                    self._files.read(piece.file, piece.offset, view[:count])
                    sent = self._uploads.submit(piece.target, buffer[:count])
            except BaseException as error:
                self._error = error
            self._free.put((buffer, view, sent))
            self._finish(piece.owner, sent)

    def _finish(self, owner: _Tensor, sent: DeviceEvent | None) -> None:
        with self._lock:
            if sent is not None:
                owner.events.append(sent)
            owner.missing -= 1
            if not owner.missing or self._error is not None:
                owner.is_there.set()


class _OpenFiles:
    """The checkpoint's files, opened once."""

    def __init__(self, reader: SafetensorsReader) -> None:
        self._reader = reader
        self._descriptors: dict[str, int] = {}
        self._starts: dict[str, int] = {}

    def start_of(self, file: str) -> int:
        """Where a file's tensors begin: behind the header, whose length stands before it."""
        if file not in self._starts:
            descriptor = self._descriptors[file] = os.open(self._reader.path / file, os.O_RDONLY)
            self._starts[file] = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
        return self._starts[file]

    def read(self, file: str, offset: int, into: memoryview) -> None:
        """Fill a buffer.

        Raises:
            ConfigError: the file ends before.
        """
        done = 0
        while done < len(into):
            count = os.preadv(self._descriptors[file], [into[done:]], offset + done)
            if not count:
                raise ConfigError(
                    f"{self._reader.path / file} ends at byte {offset + done}, before its tensors do; download it again",
                    setting="model",
                )
            done += count

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
