"""The same messages for several readers on other hosts: each over a connection of its own. Knows bytes."""

import socket
from collections.abc import Callable, Sequence

from quire.processes import read_message, write_message


class SocketWriter:
    """The writing end, with the interface of `RingWriter`.

    Args:
        connections: one for each reader; they are its own from now on.
    """

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = list(connections)

    def hand_over(self) -> None:
        """The readers have nothing of this process."""

    def send(self, message: bytes, give_up: Callable[[], bool]) -> None:
        """Write a message for all readers. Raises BrokenPipeError: a reader is gone."""
        try:
            for connection in self._connections:
                write_message(connection.fileno(), message)
        except OSError as error:
            raise BrokenPipeError(str(error)) from None

    def close(self) -> None:
        """Readers find the end of the stream; may be called twice."""
        for connection in self._connections:
            connection.close()


class SocketReader:
    """One reading end, with the interface of `RingReader`.

    Args:
        most: bytes of a message.
    """

    def __init__(self, connection: socket.socket, most: int) -> None:
        self._connection, self._most = connection, most

    def receive(self) -> bytes | None:
        """The next message; blocks until it is there. None at the end of the stream."""
        try:
            return read_message(self._connection.fileno(), self._most)
        except ConnectionError:
            return None
