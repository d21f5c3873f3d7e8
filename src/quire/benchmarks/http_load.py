"""One streamed request over a plain socket, with the moment of every event.

A load generator must cost less than the server it measures: no client library, no JSON parsing of chunks but the last.
Knows HTTP/1.1 and server-sent events. Knows nothing of rates or of what the figures are for.
"""

import asyncio
import dataclasses
import json
import ssl
import time
import urllib.parse
from typing import Any

from quire.errors import ConfigError

DONE = b"[DONE]"
READ_SIZE = 65536


@dataclasses.dataclass(frozen=True)
class Target:
    """A server."""

    host: str
    port: int
    base_path: str
    is_tls: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> "Target":
        """From `http://host:port[/path]`.

        Raises:
            ConfigError: it is no such URL.
        """
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            message = f"base_url: {url!r} is not an address; for example http://127.0.0.1:8000."
            raise ConfigError(message, setting="base_url")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), parts.path.rstrip("/"), is_tls, api_key)


@dataclasses.dataclass(slots=True)
class RequestFigures:
    """What one request saw; times in seconds of `time.perf_counter()`.

    Attributes:
        event_times: the arrival of each event that carried text.
        output_tokens: what the server counted.
        error: why it failed, None for a success.
    """

    sent: float
    prompt_tokens: int
    event_times: list[float] = dataclasses.field(default_factory=list)
    finished: float = 0.0
    output_tokens: int = 0
    status: int = 0
    error: str | None = None


async def open_stream(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the target."""
    context = ssl.create_default_context() if target.is_tls else None
    return await asyncio.open_connection(target.host, target.port, ssl=context, limit=1 << 20)


def _head(target: Target, method: str, path: str, length: int) -> bytes:
    lines = [
        f"{method} {target.base_path}{path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
    ]
    if target.api_key:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join((*lines, "", "")).encode()


async def get_json(target: Target, path: str) -> Any:
    """The JSON of a GET."""
    reader, writer = await open_stream(target)
    try:
        writer.write(_head(target, "GET", path, 0))
        status, is_chunked = await _read_head(reader)
        raw = await reader.read(-1)
        body = _unchunk(raw) if is_chunked else raw
        if status != 200:
            raise ConfigError(f"base_url: GET {path} answered {status}: {body[:300]!r}.", setting="base_url")
        return json.loads(body)
    finally:
        writer.close()


def _unchunk(raw: bytes) -> bytes:
    parts: list[bytes] = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        count = int(size or b"0", 16)
        parts.append(raw[:count])
        raw = raw[count + 2 :]
    return b"".join(parts)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    return status, b"transfer-encoding: chunked" in head.lower()


async def stream_request(target: Target, path: str, body: dict[str, Any], prompt_tokens: int) -> RequestFigures:
    """Send one request with `stream: true` and read it to its end. Failures are in the figures, not raised."""
    payload = json.dumps(body, separators=(",", ":")).encode()
    figures = RequestFigures(sent=time.perf_counter(), prompt_tokens=prompt_tokens)
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await open_stream(target)
        writer.write(_head(target, "POST", path, len(payload)) + payload)
        figures.status, _ = await _read_head(reader)
        if figures.status != 200:
            figures.error = f"status {figures.status}: {(await reader.read(2000)).decode('utf-8', 'replace')}"
        else:
            await _read_events(reader, figures)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        figures.error = f"{type(error).__name__}: {error}"
    finally:
        figures.finished = time.perf_counter()
        if writer is not None:
            writer.close()
    return figures


async def _read_events(reader: asyncio.StreamReader, figures: RequestFigures) -> None:
    """Note when text came; chunk borders of the transfer encoding are lines that do not start with `data:`."""
    last = b""
    is_done = False
    while not is_done:
        line = await reader.readline()
        if not line:
            break
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == DONE:
            is_done = True
        elif _carries_text(data):
            figures.event_times.append(time.perf_counter())
        elif data.startswith(b'{"error"'):
            figures.error = data.decode("utf-8", "replace")[:500]
        else:
            last = data
    if not is_done and figures.error is None:
        figures.error = "the stream ended before [DONE]"
    usage = json.loads(last).get("usage") if last else None
    figures.output_tokens = usage["completion_tokens"] if usage else len(figures.event_times)


def _carries_text(data: bytes) -> bool:
    """Whether a chunk has text: its text or content field is there and is not empty."""
    for field in (b'"text":"', b'"content":"', b'"text": "', b'"content": "'):
        start = data.find(field)
        if start >= 0 and data[start + len(field) : start + len(field) + 1] != b'"':
            return True
    return False
