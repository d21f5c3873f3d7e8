"""A load generator that costs a few microseconds an event: plain sockets, one poll loop, no JSON.

Reads the numbers that the device with a clock (`simulator/steady.py`) puts into its tokens, so that it knows when each of
them left the device. Knows HTTP/1.1 as our server speaks it.
"""

import dataclasses
import json
import re
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MARK = re.compile(rb" s(\d{4})")
_END = b"0\r\n\r\n"


@dataclasses.dataclass
class LoadResult:
    """What was seen; times in seconds.

    Attributes:
        added: of each read that carried tokens: from the end of the newest one's step to its arrival.
        first: of each request: from sending to its first token.
        tokens: all tokens that came.
        failed: answers that were not a complete stream, as they began.
    """

    added: list[float] = dataclasses.field(default_factory=list[float])
    first: list[float] = dataclasses.field(default_factory=list[float])
    tokens: int = 0
    seconds: float = 0.0
    failed: list[bytes] = dataclasses.field(default_factory=list[bytes])


class _Stream:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.sent = 0.0
        self.tokens = 0
        self.head = b""
        self.tail = b""


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A POST as bytes; the connection is closed after the answer."""
    payload = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload


def run_load(port: int, requests: Sequence[bytes], gaps: Sequence[float], clock: npt.NDArray[np.float64]) -> LoadResult:
    """Send each request after its gap (seconds since the one before it) and read every answer to its end."""
    result = LoadResult()
    selector = selectors.DefaultSelector()
    streams = [_Stream(port) for _ in requests]
    waiting = list(zip(streams, requests, np.cumsum(gaps).tolist(), strict=True))[::-1]
    open_streams = len(streams)
    began = time.monotonic()
    while open_streams:
        while waiting and waiting[-1][2] <= time.monotonic() - began:
            stream, data, _ = waiting.pop()
            stream.sent = time.monotonic()
            stream.socket.setblocking(True)
            stream.socket.sendall(data)
            stream.socket.setblocking(False)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        timeout = max(0.0, waiting[-1][2] - (time.monotonic() - began)) if waiting else 10.0
        for key, _ in selector.select(timeout):
            if not _read(key.data, result, clock):
                selector.unregister(key.data.socket)
                key.data.socket.close()
                open_streams -= 1
    result.seconds = time.monotonic() - began
    return result


def _read(stream: _Stream, result: LoadResult, clock: npt.NDArray[np.float64]) -> bool:
    """Take in what has come; false at the end."""
    data = stream.socket.recv(1 << 16)
    now = time.monotonic()
    if not data:
        if not stream.tail.endswith(_END):
            result.failed.append(stream.head[:500])
        return False
    marks = _MARK.findall(data)
    if marks:
        if not stream.tokens:
            result.first.append(now - stream.sent)
        stream.tokens += len(marks)
        result.tokens += len(marks)
        result.added.append(now - clock[int(marks[-1])])
    stream.head = stream.head or data
    stream.tail = data[-16:] if len(data) >= 16 else (stream.tail + data)[-16:]
    return True
