"""What comes over real sockets when clients are wrong, slow, hostile or many: no 5xx, and nothing of a request stays behind."""

import json
import socket
import time

import httpx
import pytest

BODY = json.dumps({"prompt": "one two", "max_tokens": 4}).encode()
LONG = json.dumps({"prompt": "one two", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
RESET_ON_CLOSE = (socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def post(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    size = b"Content-Length: %d" % (len(body) if length is None else length)
    return HEAD + b"".join(line + b"\r\n" for line in (*headers, size)) + b"\r\n" + body


def request(path: bytes, method: bytes = b"GET", *headers: bytes) -> bytes:
    return (
        method + b" " + path + b" HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in (b"Host: x", *headers)) + b"\r\n"
    )


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
RAW: dict[str, tuple[bytes, int]] = {
    "served": (post(BODY), 200),
    "empty": (post(b""), 400),
    "cut off": (post(BODY[:-5]), 400),
    "list": (post(b"[1]"), 400),
    "null": (post(b"null"), 400),
    "deep lists": (post(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 400),
    "deep objects": (post(b'{"a": ' * 50_000 + b"1" + b"}" * 50_000), 400),
    "integer of 5,000 digits": (post(b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"), 400),
    "infinite number": (post(b'{"prompt": "a", "temperature": 1e999}'), 400),
    "NaN": (post(b'{"prompt": "a", "temperature": NaN}'), 400),
    "almost no temperature": (post(b'{"prompt": "a", "max_tokens": 4, "temperature": 1e-300}'), 200),
    "invalid UTF-8": (post(b'{"prompt": "\xff\xfe"}'), 400),
    "UTF-16": (post(BODY.decode().encode("utf-16")), 400),
    "half a character": (post(b'{"prompt": "\\ud800"}'), 400),
    "NUL": (post(b'{"prompt": "\\u0000", "max_tokens": 4}'), 200),
    "a form": (request(b"/v1/completions", b"POST", b"Content-Type: text/plain", b"Content-Length: 1") + b"a", 400),
    "chunks": (CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), 200),
    "a wrong chunk": (CHUNKED + b"ZZ\r\nabc\r\n0\r\n\r\n", 400),
    "negative length": (post(BODY, length=-1), 400),
    "two lengths": (post(BODY, b"Content-Length: 3"), 400),
    "length and chunks": (post(b"0\r\n\r\n", b"Transfer-Encoding: chunked"), 400),
    "a petabyte to come": (post(BODY, length=10**15), 413),
    "long address": (request(b"/" + b"a" * 100_000), 400),
    "many headers": (request(b"/health", b"GET", *(b"X-%d: y" % number for number in range(5000))), 431),
    "NUL in a header": (post(BODY, b"X-Request-Id: a\x00b"), 400),
    "Latin-1 in a header": (post(BODY, b"X-Request-Id: caf\xe9"), 200),
    "bytes in an address": (request(b"/v1/models/%ff%fe%00"), 404),
    "way out": (request(b"/../../etc/passwd"), 404),
    "unknown method": (request(b"/v1/completions", b"FOO"), 400),
    "a TLS greeting": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4, 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "an offer of HTTP/2": (
        post(BODY, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMA"),
        200,
    ),
    "a websocket": (request(b"/v1/completions", b"GET", b"Upgrade: websocket", b"Connection: Upgrade"), 405),
}


def status_of(server, data: bytes) -> int:
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(data)
        return int(connection.recv(4096).split(b" ", 2)[1])


def wait_until_idle(server) -> None:
    """Fails where a request or a page is held after everybody has gone."""
    end = time.monotonic() + 60
    while any(server.gauges().values()):
        assert time.monotonic() < end, server.gauges()
        time.sleep(0.1)
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("name", RAW)
def test_what_is_sent_gets_its_status(name, demo):
    data, status = RAW[name]
    assert status_of(demo, data) == status
    assert status_of(demo, post(BODY)) == 200


def test_three_hundred_streams_that_go_away_leave_nothing(demo):
    connections = [socket.create_connection(demo.address, timeout=60) for _ in range(300)]
    for connection in connections:
        connection.sendall(post(LONG))
    assert connections[0].recv(12) == b"HTTP/1.1 200"
    assert demo.gauges()["num_requests_running"] > 0
    for index, connection in enumerate(connections):
        if index % 3 == 0:
            connection.shutdown(socket.SHUT_WR)  # half closed: no more is sent, which says that it has gone
        elif index % 3 == 1:
            connection.setsockopt(*RESET_ON_CLOSE)
            connection.close()
        else:
            connection.close()
    wait_until_idle(demo)
    for connection in connections:
        connection.close()


def test_clients_that_never_finish_their_request_hold_nobody_up(demo):
    slow = [socket.create_connection(demo.address, timeout=60) for _ in range(200)]
    for index, connection in enumerate(slow):
        connection.sendall(post(BODY)[: 20 if index % 2 else -3])
    for _ in range(3):
        for connection in slow:
            connection.sendall(b"a" if connection is not slow[0] else b"")
        assert status_of(demo, post(BODY)) == 200
    for connection in slow:
        connection.close()
    wait_until_idle(demo)


ODD: list[object] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**40, 1.5, 1e308, "", "x", "\x00", "😀" * 50),
    *([], [None], [[]], [{}], ["x"], [-1], [2**40], [["x"]], {}, {"a": None}, {"type": "x"}, {"1": 1e9}, {"-5": 1}),
    *(
        [{"type": "text"}],
        [{"role": "user"}],
        [{"role": "user", "content": [None]}],
        [{"role": "tool", "content": "x"}],
    ),
    *([{"type": "function"}], [{"type": "function", "function": {"name": "x", "parameters": 1}}]),
    *({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "zzz"}}}),
    *({"json": {"$ref": "#/nowhere"}}, {"regex": "(((("}, {"grammar": "root ::="}),
]
MESSAGES = [{"role": "user", "content": "x"}]
GOOD: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": 2},
    "/generative_scoring": {"query": "a", "items": ["b", [1]], "label_token_ids": [1, 2]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "a"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"]},
}


@pytest.mark.parametrize("path", GOOD)
def test_anything_in_any_field_is_served_or_refused(path, demo):
    document = demo.client.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][body.rsplit("/", 1)[1]]["properties"]
    with httpx.Client(base_url=demo.url, timeout=120) as client:
        for number, field in enumerate(fields):
            for value in ODD[number % 4 :: 4]:
                content = json.dumps({**GOOD[path], field: value})
                answer = client.post(path, content=content, headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400, 404), (content, answer.text)
    wait_until_idle(demo)
