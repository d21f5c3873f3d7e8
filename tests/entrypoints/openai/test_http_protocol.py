"""Clients that offer another protocol with their request are served in HTTP/1.1, body and all."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from quire.entrypoints.http.http_protocol import bounded_to

BODY = b'{"prompt": "a"}'
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


def request(offer: bytes = OFFER, body: bytes = BODY, method: bytes = b"POST") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return b"%s /echo HTTP/1.1\r\nHost: x\r\n%sX-Kept: yes\r\n%s\r\n%s" % (method, offer, length, body)


CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\nX-Kept: yes\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    % OFFER
)


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def echo(scope, receive, send) -> None:
    """Answers with the method, the headers that count, and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    told = {name: value for name, value in scope["headers"] if name in (b"upgrade", b"connection", b"x-kept")}
    answer = b"%s %r %s\n" % (scope["method"].encode(), sorted(told.items()), body)
    head = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": answer})


def talk(*pieces: bytes) -> Transport:
    """What a connection answers to pieces that come one after the other."""

    async def main() -> Transport:
        config = uvicorn.Config(
            echo, ws="none", lifespan="off", server_header=False, date_header=False, log_config=None
        )
        config.load()
        protocol = bounded_to(65536, 256)(config=config, server_state=ServerState(), app_state={})
        transport = Transport()
        protocol.connection_made(transport)
        for piece in pieces:
            protocol.data_received(piece)
            for _ in range(10):
                await asyncio.sleep(0)
        closed = transport.closed
        protocol.connection_lost(None)
        transport.closed = closed
        return transport

    return asyncio.run(main())


def answers(written: bytes) -> list[bytes]:
    return [part.split(b"\r\n\r\n", 1)[1].splitlines()[0] for part in written.split(b"HTTP/1.1 200 OK\r\n")[1:]]


def test_the_body_behind_an_offer_is_read_wherever_it_is_cut():
    for sent, body in ((request(), BODY), (CHUNKED, b"hello"), (request(body=b"", method=b"GET"), b"")):
        for cut in range(1, len(sent)):
            found = talk(sent[:cut], sent[cut:])
            method = sent.split(b" ")[0]
            assert answers(found.written) == [method + b" [(b'x-kept', b'yes')] " + body], cut
            assert not found.closed


@pytest.mark.parametrize("first", [OFFER, b""])
@pytest.mark.parametrize("second", [OFFER, b""])
def test_a_connection_goes_on_behind_an_offer(first, second):
    one, two = request(first), request(second, b"second")
    expected = [b"POST [(b'x-kept', b'yes')] " + body for body in (BODY, b"second")]
    for pieces in ((one, two), (one + two,)):
        assert answers(talk(*pieces).written) == expected


def test_a_wish_to_close_is_kept_and_a_websocket_is_an_ordinary_request():
    closing = talk(request(b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"))
    assert closing.closed and answers(closing.written)[0].startswith(b"POST [(b'connection', b'close')")
    socket = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    assert answers(talk(request(socket, b"", b"GET")).written) == [b"GET [(b'x-kept', b'yes')] "]


def test_headers_are_bounded_behind_an_offer_too():
    many = b"".join(b"X-%d: y\r\n" % number for number in range(300))
    assert talk(request(OFFER + many)).written.startswith(b"HTTP/1.1 431")
