"""The ring of shared memory: every reader gets every message, whole and in order, whatever its size and their speeds."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.executor.broadcast_ring import RingReader, RingWriter

CAPACITY = 256


class Ring:
    """A small ring with readers in threads of this process."""

    def __init__(self, num_readers: int, *, pauses: tuple[float, ...] = (), spin_s: float = 0.0) -> None:
        self.writer = RingWriter(num_readers, CAPACITY)
        self.got: list[list[bytes | None]] = [[] for _ in range(num_readers)]
        self.threads = []
        for index in range(num_readers):
            reader = RingReader(
                os.dup(self.writer.memory_fd),
                os.dup(self.writer.reader_fds[index]),
                index,
                num_readers,
                CAPACITY,
                spin_s=spin_s,
            )
            pause = pauses[index] if pauses else 0.0
            self.threads.append(threading.Thread(target=self._read, args=(index, reader, pause)))
        self.writer.hand_over()
        for thread in self.threads:
            thread.start()

    def _read(self, index: int, reader: RingReader, pause: float) -> None:
        while not self.got[index] or self.got[index][-1] is not None:
            self.got[index].append(reader.receive())
            time.sleep(pause)

    def send_all(self, messages: list[bytes]) -> None:
        """Send, close, and wait for the readers."""
        for message in messages:
            self.writer.send(message, give_up=lambda: False)
        self.writer.close()
        for thread in self.threads:
            thread.join(30)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3 * CAPACITY)), max_size=30),
    num_readers=st.integers(1, 3),
    spins=st.booleans(),
)
def test_every_reader_gets_every_message(lengths: list[int], num_readers: int, spins: bool) -> None:
    ring = Ring(num_readers, spin_s=1e-4 if spins else 0.0)
    messages = [bytes((number + i) % 256 for i in range(length)) for number, length in enumerate(lengths)]
    ring.send_all(messages)
    assert ring.got == [[*messages, None]] * num_readers


def test_the_writer_waits_for_the_slowest() -> None:
    ring = Ring(2, pauses=(0.0, 0.002))
    messages = [bytes([number]) * 50 for number in range(60)]
    ring.send_all(messages)
    assert ring.got == [[*messages, None]] * 2


def test_a_writer_without_use_gives_up() -> None:
    writer = RingWriter(1, CAPACITY)
    with pytest.raises(BrokenPipeError):
        writer.send(bytes(2 * CAPACITY), give_up=lambda: True)
    writer.close()
    writer.close()


def test_a_writer_hears_of_a_reader_that_is_gone() -> None:
    writer = RingWriter(1, CAPACITY)
    writer.hand_over()
    with pytest.raises(BrokenPipeError):
        writer.send(b"anybody?", give_up=lambda: False)
    writer.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    yield (ends := os.pipe())
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass
