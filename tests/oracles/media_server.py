"""A server of files on this machine, whose answers a test writes byte by byte, and which counts who asks."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Self

Talk = Callable[[socket.socket], None]
"""What happens after the request has been read."""


def answer(body: bytes, status: str = "200 OK", **headers: str) -> Talk:
    """One plain answer. `headers`: with `_` in the place of `-`."""
    named = {"Content_Length": str(len(body))} | headers
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return lambda peer: peer.sendall(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)


def redirect(url: str, status: str = "302 Found") -> Talk:
    """The file is elsewhere."""
    return answer(b"", status, Location=url)


class MediaServer:
    """Answers what is behind each path; another path ends the connection.

    Args:
        tls: speaks TLS.

    Attributes:
        asked: the paths that were asked for, in order.
        hosts: the `Host` header of each.
    """

    def __init__(self, files: dict[str, Talk] | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.files, self._tls = files or {}, tls
        self.asked: list[str] = []
        self.hosts: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            if self._tls is not None:
                peer = self._tls.wrap_socket(peer, server_side=True)
            head = b""
            while b"\r\n\r\n" not in head:
                piece = peer.recv(4096)
                if not piece:
                    return
                head += piece
            lines = head.decode().split("\r\n")
            path = lines[0].split()[1]
            self.hosts += [line[6:] for line in lines if line.lower().startswith("host: ")]
            self.asked.append(path)
            if path in self.files:
                self.files[path](peer)
            peer.close()
