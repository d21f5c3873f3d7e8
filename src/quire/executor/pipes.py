"""Messages through a pipe: a length, then bytes. Knows nothing of what they mean."""

import os
import struct

_LENGTH = struct.Struct("=Q")
_CHUNK = 1 << 20


def write_message(descriptor: int, data: bytes) -> None:
    """Write one message whole. Blocks while the pipe is full.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


class MessageReader:
    """The reading end of a pipe; the descriptor stays its owner's."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def read(self) -> bytes | None:
        """One message whole, waiting for all of it; None at the end of the stream."""
        length = self._take(_LENGTH.size)
        return None if length is None else self._take(_LENGTH.unpack(length)[0])

    def _take(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            piece = os.read(self.descriptor, min(_CHUNK, count - len(data)))
            if not piece:
                return None
            data += piece
        return bytes(data)
