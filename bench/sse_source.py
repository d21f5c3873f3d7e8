"""The cheapest server that streams completions: constant chunks, no model. What a load client can take is measured with it.

Run as a module, with the seconds between two tokens of a stream (0: as fast as it can), it prints its URL and serves until
standard input ends. Query parameters of the route: `first_ms` before the first token, `broken` to close in mid-stream.
"""

import asyncio
import contextlib
import json
import sys
import threading
import urllib.parse
from typing import Any

import httptools

FIELDS = '"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"model":"source"'
CHOICE = b'{"index":0,"text":" word","logprobs":null,"finish_reason":%s,"stop_reason":null}'
EVENT = b'data: {%s,"choices":[' + CHOICE + b'],"usage":null}\n\n'
USAGE = (
    b'data: {%s,"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = _framed(EVENT % (FIELDS.encode(), b"null"))
LAST_TOKEN = _framed(EVENT % (FIELDS.encode(), b'"length"'))


class _Streams:
    """All answers under way: a step writes one token to each."""

    def __init__(self) -> None:
        self.running: set[_Connection] = set()
        self._wake = asyncio.Event()

    def add(self, connection: "_Connection") -> None:
        self.running.add(connection)
        self._wake.set()

    async def run(self, step_s: float) -> None:
        while True:
            await self._wake.wait()
            for connection in list(self.running):
                connection.write_token()
            if not self.running:
                self._wake.clear()
            await asyncio.sleep(step_s)


class _Connection(asyncio.Protocol):
    """One client's socket."""

    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._url = b""
        self._body = b""
        self._inputs = self._outputs = self._left = 0
        self._is_broken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.running.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """The parser's."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """The parser's."""
        self._body += body

    def on_message_complete(self) -> None:
        """The parser's: a whole request is there."""
        url, body = urllib.parse.urlsplit(self._url.decode()), self._body
        self._url = self._body = b""
        if not body:
            self._answer_json(200, {"data": [{"id": "source"}]})
            return
        request = json.loads(body)
        options = urllib.parse.parse_qs(url.query)
        prompt = request.get("prompt", "")
        if request.get("model") != "source":
            self._answer_json(404, {"error": {"message": f"model: there is no {request.get('model')!r}."}})
            return
        self._inputs = len(prompt)
        self._outputs = self._left = request["max_tokens"]
        self._is_broken = "broken" in options
        asyncio.get_running_loop().call_later(float(options.get("first_ms", ["0"])[0]) / 1000, self._begin)

    def _begin(self) -> None:
        self._transport.write(HEAD)
        self._streams.add(self)

    def _answer_json(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    def write_token(self) -> None:
        """One more token of the answer, and its end after the last."""
        self._left -= 1
        if self._left > 0:
            self._transport.write(TOKEN)
            if self._is_broken:
                self._streams.running.discard(self)
                self._transport.close()
            return
        self._streams.running.discard(self)
        total = self._inputs + self._outputs
        usage = _framed(USAGE % (FIELDS.encode(), self._inputs, self._outputs, total))
        self._transport.write(LAST_TOKEN + usage + b"0\r\n\r\n")


async def _serve(step_s: float) -> None:
    loop = asyncio.get_running_loop()
    streams = _Streams()
    server = await loop.create_server(lambda: _Connection(streams), "127.0.0.1", 0, backlog=4096)
    ended = asyncio.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    stepping = asyncio.create_task(streams.run(step_s))
    await ended.wait()
    stepping.cancel()
    server.close()


if __name__ == "__main__":
    from quire.benchmarks.load import run_coroutine

    with contextlib.suppress(KeyboardInterrupt):  # the parent tells of it
        run_coroutine(_serve(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0))
