"""The load's client: events of any shape and any split, failures, kept connections, several processes."""

import asyncio
import json
import random

import pytest
from bench.client import started_source

from quire.benchmarks.http_load import Client, RequestRecord, carries_tokens, event_text
from quire.benchmarks.load import LoadJob, run_load
from quire.entrypoints.http_client import Target, control
from quire.errors import ConfigError, EngineError


def chunk(choices: list, spaced: bool = False, **fields) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps({"id": "x", "choices": choices, **fields}, separators=separators, ensure_ascii=False).encode()


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"text": "a", "finish_reason": None}, True),
        ({"text": "]", "finish_reason": None}, True),
        ({"text": '"role"', "finish_reason": None}, True),
        ({"text": "", "finish_reason": None}, True),  # a token whose text is held back
        ({"text": "", "finish_reason": "length"}, False),
        ({"text": "z", "finish_reason": "stop"}, True),
        ({"text": "", "finish_reason": "stop", "token_ids": [5]}, True),
        ({"text": "", "finish_reason": "stop", "token_ids": []}, False),
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": "Hi"}, "finish_reason": None}, True),
        ({"delta": {"content": "Hi"}, "finish_reason": None}, True),
        ({"delta": {"reasoning_content": "hm"}, "finish_reason": None}, True),
        ({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, "finish_reason": None}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_chunks_of_tokens_are_told_from_others(choice, expected, spaced):
    assert carries_tokens(chunk([choice], spaced)) is expected
    assert not carries_tokens(chunk([], spaced, usage={"completion_tokens": 3}))


def test_text_of_a_chunk():
    assert event_text(chunk([{"text": "a"}])) == "a" and event_text(chunk([{"delta": {"content": "b"}}])) == "b"
    assert event_text(chunk([{"delta": {"role": "assistant"}}])) == "" == event_text(chunk([]))


def test_addresses_are_checked():
    assert Target.parse("http://h:1/base/v1").base_path == "/base" and Target.parse("https://h").port == 443
    assert Target.parse("http://[::1]:7").url == "http://[::1]:7"
    for url in ("h:1", "ftp://h", "http://", "http://h:x"):
        with pytest.raises(ConfigError, match="base_url"):
            Target.parse(url)


EVENTS = [
    chunk([{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]),
    chunk([{"delta": {"content": "Grüße "}, "finish_reason": None}]),
    chunk([{"delta": {"content": "\r\n\n"}, "finish_reason": None}]),
    chunk([{"delta": {}, "finish_reason": "stop"}]),
    chunk([], usage={"prompt_tokens": 4, "completion_tokens": 3}),
    b"[DONE]",
]


async def answer_with(
    answers: list[list[bytes]], num_requests: int, keep: bool = True
) -> tuple[list[RequestRecord], int]:
    """Records of requests, one after another, to a server that writes these pieces; and how many connections it saw."""
    opened = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while answers:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            await reader.readexactly(2)
            for piece in answers.pop(0):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if not keep:
                break
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    target = Target("127.0.0.1", server.sockets[0].getsockname()[1])
    client = Client(target, keep_text=True)
    records = []
    for _ in range(num_requests):
        records.append(RequestRecord())
        await client.send(target.request_head("/v1/x") + b"2\r\n\r\n{}", records[-1])
        await asyncio.sleep(0.01)  # a closing server is noticed
    client.close()
    server.close()
    return records, opened


def http_answer(body: bytes, sizes: list[int] | None, status: int = 200) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: text/event-stream\r\n" % status
    if sizes is None:
        return head + b"content-length: %d\r\n\r\n" % len(body) + body
    framed = b""
    for size in sizes:
        framed += b"%x\r\n%s\r\n" % (len(body[:size]), body[:size]) if body[:size] else b""
        body = body[size:]
    return head + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_stream_is_read_alike_however_it_is_cut(line_end, framing):
    body = b": hello" + line_end * 2 + b"".join(b"data: " + event + line_end * 2 for event in EVENTS)
    source = random.Random(1)
    for _ in range(30):
        sizes = None if framing == "length" else [source.randint(1, 60) for _ in range(200)]
        raw = http_answer(body, sizes)
        cuts = sorted(source.sample(range(1, len(raw)), 6))
        pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        records, _ = asyncio.run(answer_with([pieces], 1))
        record = records[0]
        assert record.error == "" and len(record.event_times) == 2 and record.text == "Grüße \r\n\n"
        assert (record.input_tokens, record.output_tokens) == (4, 3)
        assert record.sent < record.event_times[0] <= record.ended <= record.finished


def test_a_first_token_without_text_is_counted_by_the_event_that_opens_the_answer():
    opening, *others = EVENTS
    pieces = [http_answer(b"", [1])[: -len(b"0\r\n\r\n")]]
    for event in (opening, *others):
        framed = b"data: " + event + b"\n\n"
        pieces.append(b"%x\r\n%s\r\n" % (len(framed), framed))
    pieces[-1] += b"0\r\n\r\n"
    (record,), _ = asyncio.run(answer_with([list(pieces)], 1))
    assert len(record.event_times) == 2, "three tokens: two with text, and the end"
    pieces[5] = pieces[5].replace(b'"completion_tokens":3', b'"completion_tokens":4')
    (record,), _ = asyncio.run(answer_with([list(pieces)], 1))
    assert len(record.event_times) == 3 and record.event_times == sorted(record.event_times)


def stream(events: list[bytes]) -> bytes:
    return http_answer(b"".join(b"data: " + event + b"\n\n" for event in events), None)


def test_connections_are_kept_and_one_that_was_closed_meanwhile_is_replaced():
    records, opened = asyncio.run(answer_with([[stream(EVENTS)] for _ in range(3)], 3))
    assert opened == 1 and all(not record.error for record in records)
    records, opened = asyncio.run(answer_with([[stream(EVENTS)] for _ in range(3)], 3, keep=False))
    assert opened == 3 and all(not record.error for record in records)


def test_each_failure_says_what_went_wrong():
    error_event = b'{"error":{"message":"out of pages"}}'
    cases = {
        "status 429: full": http_answer(b"full", None, 429),
        "out of pages": stream([EVENTS[1], error_event, b"[DONE]"]),
        "ended before [DONE]": stream(EVENTS[:2]),
        "closed the connection": stream(EVENTS)[:150],
        "is not HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    }
    for expected, raw in cases.items():
        records, _ = asyncio.run(answer_with([[raw]], 1, keep=False))
        assert expected in records[0].error and records[0].finished > 0


def test_nobody_there_is_an_error_of_each_request():
    job = LoadJob(Target("127.0.0.1", 1), "/v1/completions", [b"{}"] * 2, [0.0] * 2)
    assert all("ConnectionRefused" in record.error for record in run_load(job).records)


@pytest.fixture(scope="module")
def source_url():
    with started_source() as url:
        yield url


def source_job(url: str, lengths: list[int], path: str = "/v1/completions", **fields) -> LoadJob:
    bodies = [json.dumps({"model": "source", "prompt": [1, 2, 3], "max_tokens": length}).encode() for length in lengths]
    return LoadJob(Target.parse(url), path, bodies, [0.0] * len(bodies), **fields)


@pytest.mark.parametrize("num_clients", [1, 3])
def test_every_token_of_every_stream_is_seen_in_the_order_of_the_requests(source_url, num_clients):
    lengths = [1 + index % 9 for index in range(40)]
    result = run_load(source_job(source_url, lengths, keep_text=True), num_clients)
    assert [record.error for record in result.records] == [""] * 40
    assert [len(record.event_times) for record in result.records] == lengths
    assert [record.output_tokens for record in result.records] == lengths
    assert [record.text for record in result.records] == [" word" * length for length in lengths]
    assert all(result.began <= record.sent <= record.event_times[0] for record in result.records)


def test_no_more_requests_run_at_once_than_may(source_url):
    from quire.benchmarks.serve_metrics import peak_concurrency

    for num_clients in (1, 2):
        result = run_load(source_job(source_url, [20] * 12, max_concurrency=3), num_clients)
        assert 0 < peak_concurrency(result.records) <= 3


def test_requests_are_not_sent_before_their_time(source_url):
    job = source_job(source_url, [2] * 4)
    job.times = [0.0, 0.05, 0.05, 0.1]
    result = run_load(job)
    assert all(record.sent - result.began >= at for record, at in zip(result.records, job.times, strict=True))


def test_a_server_that_breaks_off_is_told(source_url):
    result = run_load(source_job(source_url, [5, 5], path="/v1/completions?broken=1"))
    assert all("closed the connection" in record.error for record in result.records)


def test_control_requests_give_json_or_say_what_came_instead(source_url):
    target = Target.parse(source_url)
    assert control(target, "GET", "/v1/models") == {"data": [{"id": "source"}]}
    with pytest.raises(EngineError, match="answered 404"):
        control(target, "POST", "/v1/completions", {"model": "other", "max_tokens": 1})
