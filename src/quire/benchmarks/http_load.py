"""Streamed requests over plain sockets, with the moment of every event.

A load generator must cost less than the server it measures: no client library, no task switch and no JSON a token; the HTTP
framing is parsed by httptools. Knows HTTP/1.1 and server-sent events. Knows nothing of rates or of what the figures are for.
"""

import asyncio
import json
import socket
import time
from typing import Any

import httptools
import msgspec

from quire.entrypoints.http_client import Target


class RequestRecord(msgspec.Struct):
    """What one request saw; times in seconds of `time.perf_counter()`, which the processes of a machine share.

    Attributes:
        event_times: the arrival of each event that carried tokens. An opening event without text (a chat's role) is one of them
            where the events after it are fewer than the tokens: it is the first token's event, which had no text.
        ended: the arrival of the last event with a choice in it.
        finished: when the answer was complete, or the request failed.
        input_tokens, output_tokens: what the server counted; None where it told nothing.
        text: what was generated, if it was asked for.
        error: why it failed, empty for a success.
    """

    sent: float = 0.0
    event_times: list[float] = []
    ended: float = 0.0
    finished: float = 0.0
    input_tokens: int | None = None
    output_tokens: int | None = None
    text: str | None = None
    error: str = ""


class Client:
    """Connections to one server, opened when they are needed and kept while the server keeps them.

    Args:
        keep_text: remember what is generated.
    """

    def __init__(self, target: Target, keep_text: bool = False) -> None:
        self._target = target
        self._keep_text = keep_text
        self._idle: list[_Connection] = []
        self._tls = target.tls_context()
        self._address: tuple[Any, ...] | None = None

    async def send(self, payload: bytes, record: RequestRecord) -> None:
        """Send a whole request and read its stream to the end; the record has the result, and the failure if it fails."""
        record.sent = time.perf_counter()
        record.event_times = []
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            if await connection.exchange(payload, record):
                # The server closed a kept connection just when it was used again.
                connection = await self._connect()
                await connection.exchange(payload, record)
        except OSError as error:
            record.error = f"{type(error).__name__}: {error}"
            record.finished = time.perf_counter()

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        address = self._address or await self.find_address()
        name = self._target.host if self._tls else None
        _, connection = await loop.create_connection(
            lambda: _Connection(self._idle, self._keep_text), *address, ssl=self._tls, server_hostname=name
        )
        return connection

    async def find_address(self) -> tuple[Any, ...]:
        """Ask for the host's address, once: a look-up for each connection would go through a thread.
        Raises OSError: there is no such host."""
        target = self._target
        found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        self._address = await self._first_that_answers([info[4][:2] for info in found])
        return self._address

    async def _first_that_answers(self, addresses: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        for address in addresses[:-1]:
            try:
                _, writer = await asyncio.open_connection(*address)
                writer.close()
                return address
            except OSError:
                continue
        return addresses[-1]

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Connection(asyncio.Protocol):
    """One socket: at most one request at a time.

    Args:
        idle: where it waits for the next request.
    """

    def __init__(self, idle: "list[_Connection]", keep_text: bool) -> None:
        self._idle = idle
        self._keep_text = keep_text
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[bool] | None = None
        self._record = RequestRecord()
        self._now = 0.0
        self._status = 0
        self._rest = b""
        self._last_event = b""
        self._is_done = False
        self._is_used = False
        self._has_answer = False
        self._opened: float | None = None
        self._has_bare_end = False
        self._events: list[bytes] = []

    def exchange(self, payload: bytes, record: RequestRecord) -> "asyncio.Future[bool]":
        """Send a request. The future's value: whether the socket, used before, was closed without a byte of an answer."""
        self._record = record
        self._done = asyncio.get_running_loop().create_future()
        self._status, self._rest, self._last_event, self._events = 0, b"", b"", []
        self._is_done = self._has_answer = False
        self._opened, self._has_bare_end = None, False
        self._transport.write(payload)
        return self._done

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._has_answer = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._done is None or self._done.done():
            return
        if self._is_used and not self._has_answer:
            self._done.set_result(True)
        elif self._is_done:
            self._finish()
        else:
            reason = f": {exc}" if exc else ""
            self._fail(f"the server closed the connection before the answer was complete{reason}")

    def on_headers_complete(self) -> None:
        """The parser's: a status is there."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """The parser's: bytes of the answer, without its framing."""
        if self._rest:
            body = self._rest + body
            self._rest = b""
        if self._status != 200:
            self._rest = body[:2000]
            return
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        if body[-2:] != b"\n\n":
            end = body.rfind(b"\n\n") + 2
            if end == 1:
                self._rest = body
                return
            self._rest = body[end:]
            body = body[:end]
        for event in body[:-2].split(b"\n\n"):
            self._on_event(event)

    def _on_event(self, event: bytes) -> None:
        if event[:6] == b"data: ":
            data = event[6:]
        else:
            data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if b'"choices"' not in data:
            if data == b"[DONE]":
                self._is_done = True
            elif data.startswith((b'{"error"', b'{"object":"error"')):
                self._record.error = data.decode("utf-8", "replace")[:500]
            return
        self._last_event = data
        if self._opened is None:
            self._opened = self._now
        if carries_tokens(data):
            self._record.event_times.append(self._now)
            self._record.ended = self._now
        elif b'"finish_reason":"' in data or b'"finish_reason": "' in data:
            self._record.ended, self._has_bare_end = self._now, True
        if self._keep_text:
            self._events.append(data)

    def on_message_complete(self) -> None:
        """The parser's: the answer has ended."""
        if self._status != 200:
            self._fail(f"status {self._status}: {self._rest.decode('utf-8', 'replace')}")
        elif not self._is_done and not self._record.error:
            self._fail("the stream ended before [DONE]")
        else:
            self._finish()
        self._is_used = True
        if self._parser.should_keep_alive():
            self._idle.append(self)
        else:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        self._record.error = reason
        self._finish()

    def _finish(self) -> None:
        record = self._record
        record.finished = self._now if self._is_done else time.perf_counter()
        usage = _usage(self._last_event)
        record.input_tokens, record.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if self._keep_text:
            record.text = "".join(map(event_text, self._events))
        if self._opened is not None and self._is_missing_first(record):
            record.event_times.insert(0, self._opened)
        if not record.event_times and record.ended:
            record.event_times.append(record.ended)  # all that came was the end
        if self._done is not None and not self._done.done():
            self._done.set_result(False)

    def _is_missing_first(self, record: RequestRecord) -> bool:
        """Whether the first token came with the opening event alone, by the number of tokens that the server tells."""
        times = record.event_times
        if record.output_tokens is None or not times or self._opened is None or self._opened >= times[0]:
            return False
        return (
            len(times) + self._has_bare_end < record.output_tokens
        )  # an end without text may be the last token's event


_FIELDS = tuple(f'"{name}":"'.encode() for name in ("text", "content", "reasoning_content", "reasoning", "arguments"))
_FIELDS += (b'"token_ids":[',)
_EMPTY = tuple((field, b'"' if field.endswith(b'"') else b"]") for field in _FIELDS)
_EMPTY_SPACED = tuple((field.replace(b":", b": "), end) for field, end in _EMPTY)


def carries_tokens(data: bytes) -> bool:
    """Whether a chunk carries tokens: it has text (or token ids), or it only continues.

    A chunk of an empty text that neither opens an answer (`role`) nor ends it carries a token whose text is still held
    back.
    """
    is_spaced = b'"choices": ' in data
    is_empty = False
    for field, end in _EMPTY_SPACED if is_spaced else _EMPTY:
        start = data.find(field)
        if start >= 0:
            if not data.startswith(end, start + len(field)):
                return True
            is_empty = True
    goes_on = b'"finish_reason": null' if is_spaced else b'"finish_reason":null'
    return is_empty and goes_on in data and b'"role"' not in data


def event_text(data: bytes) -> str:
    """The text of a chunk: of completions, or content of a chat."""
    choices = json.loads(data).get("choices") or [{}]
    choice = choices[0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _usage(data: bytes) -> dict[str, Any]:
    try:
        return (json.loads(data).get("usage") or {}) if data else {}
    except ValueError:
        return {}
