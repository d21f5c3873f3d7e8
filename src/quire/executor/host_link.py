"""A connection between two hosts: messages whole, both ways; it ends when the other side does, or has been silent for too long.

Knows bytes.
"""

import contextlib
import queue
import socket
import struct
import threading

from quire.processes import read_message, write_message

BEAT_S = 1.0
"""A side that has nothing to say says so, so often."""
SILENT_S = 10
"""A side from which nothing has come for so long is gone."""
MAX_MESSAGE_BYTES = 1 << 30
"""Of any message between hosts: the largest have media."""
MAX_GREETING_BYTES = 1 << 20
_FLUSH_S = 5.0


class HostLink:
    """One end.

    Args:
        connection: belongs to it from now on.

    Attributes:
        peer, address: the other host's address, and this one's as that reaches it.
        most: bytes of a message that comes; whoever goes on with a stranger who has greeted raises it.
    """

    def __init__(self, connection: socket.socket, most: int = MAX_MESSAGE_BYTES) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SILENT_S, 0))
        self.peer, self.address = str(connection.getpeername()[0]), str(connection.getsockname()[0])
        self.most = most
        self._connection = connection
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="host-link", daemon=True)
        self._writer.start()

    def send(self, data: bytes) -> None:
        """Send a message, from any thread; never waits."""
        self._out.put(data)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader finds out
            while (data := self._next()) is not None:
                write_message(self._connection.fileno(), data)
            self._connection.shutdown(socket.SHUT_WR)

    def _next(self) -> bytes | None:
        try:
            return self._out.get(timeout=BEAT_S)
        except queue.Empty:
            return b""

    def receive(self) -> bytes | None:
        """The next message; waits for it. None: the other side has ended, or is silent."""
        with contextlib.suppress(OSError):
            while (data := read_message(self._connection.fileno(), self.most)) is not None:
                if data:
                    return data
        return None

    def end(self) -> None:
        """Say nothing more; what was sent still goes."""
        self._out.put(None)

    def close(self) -> None:
        """End it when what was sent has gone, or cannot go; who reads finds the end. May be called twice, from any thread."""
        self.end()
        self._writer.join(_FLUSH_S)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._writer.join()
        self._connection.close()
