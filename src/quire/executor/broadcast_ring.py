"""One writer, several readers: messages in a ring of shared memory, written once, however many read them.

The memory is a file without a name; a process that is given its descriptor may map it. A pipe to each reader says how far has
been written, so that a reader blocks in the kernel, hears of the writer's death, and needs no barrier of its own: what the writer
stored before it wrote to the pipe is seen by a reader that has read from it. Knows bytes; knows nothing of what they mean.

Layout: one word for each reader, how far it has read; then the ring. Positions count bytes since the start and never wrap.
"""

import mmap
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Protocol

from quire.descriptors import memory_file

CAPACITY = 16 << 20
"""Bytes of the ring. Its memory is taken where it is written: small messages of a long life go round all of it."""
_WORD = struct.Struct("=Q")
_WORDS_AT_ONCE = 512
_PAUSE_S = 50e-6
"""Between two looks at a full ring; only messages of millions of tokens fill it."""


def _header_bytes(num_readers: int) -> int:
    return -(-num_readers * _WORD.size // mmap.PAGESIZE) * mmap.PAGESIZE


class Broadcast(Protocol):
    """What writes a message for all readers."""

    def hand_over(self) -> None:
        """The readers have what they need of this process."""
        ...

    def send(self, message: bytes, give_up: Callable[[], bool]) -> None:
        """Write a message; raises BrokenPipeError."""
        ...

    def close(self) -> None:
        """Readers find the end of the stream."""
        ...


class RingWriter:
    """The writing end.

    Attributes:
        memory_fd: to be handed to every reader.
        reader_fds: for each reader its end of the pipe; the writer's process closes them once they are handed over.
    """

    def __init__(self, num_readers: int, capacity: int = CAPACITY) -> None:
        self._header = _header_bytes(num_readers)
        self._capacity = capacity
        self.memory_fd = memory_file(self._header + capacity, "quire-ring")
        self._map = mmap.mmap(self.memory_fd, self._header + capacity)
        self._bytes = memoryview(self._map)
        self._read_words = self._bytes[: num_readers * _WORD.size].cast("Q")
        self._ring = self._bytes[self._header :]
        self._written = 0
        pipes = [os.pipe() for _ in range(num_readers)]
        self.reader_fds = [reader for reader, _ in pipes]
        self._pipes = [writer for _, writer in pipes]
        self._is_closed = False

    def hand_over(self) -> None:
        """The readers have their descriptors: close this process's own."""
        for descriptor in (*self.reader_fds, self.memory_fd):
            os.close(descriptor)
        self.reader_fds, self.memory_fd = [], -1

    def send(self, message: bytes, give_up: Callable[[], bool]) -> None:
        """Write a message for all readers. Waits for room, unless `give_up` says that there is no use in it.

        Raises:
            BrokenPipeError: a reader is gone, or `give_up` said so.
        """
        data = memoryview(_WORD.pack(len(message)) + message)
        while data:
            free = self._capacity - (self._written - min(self._read_words))
            if not free:
                if give_up():
                    raise BrokenPipeError("the readers have stopped reading")
                time.sleep(_PAUSE_S)
                continue
            at = self._written % self._capacity
            count = min(len(data), free, self._capacity - at)
            self._ring[at : at + count] = data[:count]
            self._written += count
            data = data[count:]
            if not data or free == count:  # a message in one piece wakes its readers once
                word = _WORD.pack(self._written)
                for pipe in self._pipes:
                    os.write(pipe, word)

    def close(self) -> None:
        """Readers find the end of the stream; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for pipe in self._pipes:
            os.close(pipe)
        if self.memory_fd >= 0:
            self.hand_over()
        self._read_words.release()
        self._ring.release()
        self._bytes.release()
        self._map.close()


class RingReader:
    """One reading end.

    Args:
        index: which of the writer's readers this is.
        spin_s: for so long a reader asks again and again before it blocks, which takes a core and saves a wake-up.
    """

    def __init__(
        self, memory_fd: int, pipe_fd: int, index: int, num_readers: int, capacity: int = CAPACITY, spin_s: float = 0.0
    ) -> None:
        header = _header_bytes(num_readers)
        self._map = mmap.mmap(memory_fd, header + capacity)
        os.close(memory_fd)
        memory = memoryview(self._map)
        self._read_word = memory[index * _WORD.size : (index + 1) * _WORD.size].cast("Q")
        self._ring = memory[header:]
        self._capacity, self._spin_s = capacity, spin_s
        self._pipe = pipe_fd
        self._poll = select.poll()
        self._poll.register(pipe_fd, select.POLLIN)
        self._read = self._written = 0

    def receive(self) -> bytes | None:
        """The next message; blocks until it is there. None at the end of the stream."""
        size = self._take(_WORD.size)
        return None if size is None else self._take(_WORD.unpack(size)[0])

    def _take(self, count: int) -> bytes | None:
        taken = bytearray()
        while len(taken) < count:
            if self._read == self._written and not self._hear():
                return None
            at = self._read % self._capacity
            step = min(count - len(taken), self._written - self._read, self._capacity - at)
            taken += self._ring[at : at + step]
            self._read += step
            self._read_word[0] = self._read
        return bytes(taken)

    def _hear(self) -> bool:
        """Wait for the writer's word; false when it is gone."""
        if self._spin_s:
            until = time.perf_counter() + self._spin_s
            while not self._poll.poll(0) and time.perf_counter() < until:
                pass
        words = os.read(self._pipe, _WORDS_AT_ONCE * _WORD.size)
        if len(words) < _WORD.size:
            return False
        self._written = _WORD.unpack_from(words, len(words) - _WORD.size)[0]
        return True
