"""Streams over real sockets and the hash model: every text is the oracle's, however many there are and however slowly they are
read; whoever goes away is forgotten; a dead core is told of."""

import asyncio
import glob
import json
import os
import re
import signal
import socket
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from tests.engine.builders import ENDLESS, ROOM, write_model_folder
from tests.entrypoints.openai.conftest import serve
from tests.oracles.hash_model import HashModel
from tests.oracles.server_process import ServerProcess

from quire.entrypoints.http import long_bodies
from quire.entrypoints.http.long_bodies import AT_ONCE
from quire.entrypoints.http.push import PushedStream
from quire.entrypoints.openai import completions
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.tokenizers.loader import get_tokenizer

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[3]
MODEL = HashModel(vocab_size=512)


class HashServer(ServerProcess):
    """A server process; `port` is where it listens."""

    def __init__(self, folder: Path, core: str, max_len: int) -> None:
        super().__init__("-m", "tests.oracles.hash_server", str(folder), core, str(max_len))
        self.port = int(self.url.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model_folder(tmp_path_factory.mktemp("hash"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return get_tokenizer(str(folder))


@pytest.fixture(scope="module", params=["inproc", "process"])
def server(request, folder):
    server = HashServer(folder, request.param, ROOM["max_model_len"])
    yield server
    assert "Traceback" not in server.end(signal.SIGTERM)[1]


async def read_chunked(reader):
    """A chunked body, checked to the letter."""
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return b"".join(parts)


async def post(reader, writer, path, body):
    """One request on an open connection: status and body."""
    send(writer, path, body)
    return await receive(reader)


def send(writer, path, body):
    payload = json.dumps(body).encode()
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(payload)) + payload)


async def receive(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if b"transfer-encoding: chunked" in head:
        return status, await read_chunked(reader)
    return status, await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))


def events_of(body):
    """The chunks of a stream that ends as it should."""
    lines = body.decode().split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def text_of(events, index=0):
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def expected(tokenizer, prompt, max_tokens, seed):
    from quire.tokenizers.detokenizer import detokenize

    tokens = MODEL.oracle(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed, 10_000)
    return detokenize(tokenizer, prompt, tokens)


def completion(prompt, max_tokens, seed, **fields):
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": seed, "ignore_eos": True, "stream": True}
    return {**body, **fields}


async def stream_once(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await post(reader, writer, "/v1/completions", body)
    finally:
        writer.close()


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_many_streams_at_once_are_the_oracle_s(server, tokenizer, count):
    async def main():
        bodies = [completion([5, i % 400, 7], 3 + i % 20, i) for i in range(count)]
        answers = await asyncio.gather(*(stream_once(server.port, body) for body in bodies))
        for index, (status, answer) in enumerate(answers):
            assert status == 200
            events = events_of(answer)
            assert text_of(events) == expected(tokenizer, [5, index % 400, 7], 3 + index % 20, index)
            assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
            assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])

    asyncio.run(main())


VARIANTS = [
    {},
    {"stop": ["e", "xyz"]},
    {"stop": ["never there"]},
    {"logprobs": 1},
    {"n": 3},
    {"echo": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"prompt": [[5, 6], [7, 8]]},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=json.dumps)
def test_a_stream_says_what_the_whole_answer_says(server, fields):
    async def main():
        body = {**completion([5, 6, 7], 40, 3), **fields}
        _, streamed = await stream_once(server.port, body)
        _, whole = await stream_once(server.port, {**body, "stream": False, "stream_options": None})
        answer, events = json.loads(whole), events_of(streamed)
        for choice in answer["choices"]:
            index = choice["index"]
            assert text_of(events, index) == choice["text"]
            finish = [c["finish_reason"] for event in events for c in event["choices"] if c["index"] == index]
            assert finish[-1] == choice["finish_reason"] and not any(finish[:-1])
        if fields.get("stream_options"):
            assert events[-1]["choices"] == [] and events[-1]["usage"] == answer["usage"]

    asyncio.run(main())


def test_a_chat_s_stream_says_what_its_answer_says_and_connections_are_used_again(server):
    async def main():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "seed": 1, "ignore_eos": True}
        body["chat_template"] = None
        status, whole = await post(reader, writer, "/v1/chat/completions", body)
        if status != 200:
            pytest.skip("this tokenizer has no chat template")
        for _ in range(3):
            _, streamed = await post(reader, writer, "/v1/chat/completions", {**body, "stream": True})
            events = events_of(streamed)
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert text_of(events) == json.loads(whole)["choices"][0]["message"]["content"]
        writer.close()

    asyncio.run(main())


def test_connections_are_used_again_after_a_stream(server, tokenizer):
    async def main():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for seed in range(3):
            status, answer = await post(reader, writer, "/v1/completions", completion([5, 6], 20, seed))
            assert status == 200 and text_of(events_of(answer)) == expected(tokenizer, [5, 6], 20, seed)
        writer.close()

    asyncio.run(main())


def test_a_refused_request_has_a_status_and_not_a_stream(server):
    async def main():
        status, answer = await stream_once(server.port, completion([5, 9999], 5, 0))
        assert status == 400 and json.loads(answer)["error"]["param"] == "prompt"

    asyncio.run(main())


def test_a_slow_client_gets_everything_and_the_others_do_not_wait(server, tokenizer):
    async def main():
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(sock=slow, limit=2048)
        send(writer, "/v1/completions", completion([5, 6], 3000, 1, request_id="x" * 120))
        for seed in range(3):
            _, other = await stream_once(server.port, completion([5, 6], 1500, seed))
            assert text_of(events_of(other)) == expected(tokenizer, [5, 6], 1500, seed)
        async with httpx.AsyncClient(base_url=server.url) as client:
            while not re.search(r"num_requests_running\{.*\} 0\.0", (await client.get("/metrics")).text):
                await asyncio.sleep(0.05)
        _, data = await receive(reader)
        events = events_of(data)
        assert text_of(events) == expected(tokenizer, [5, 6], 3000, 1)
        writer.close()

    asyncio.run(main())


def test_a_client_that_goes_away_is_forgotten(server):
    async def main():
        async with httpx.AsyncClient(base_url=server.url) as client:
            before = aborted(await client.get("/metrics"))
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                send(writer, "/v1/completions", completion([5, 6], ENDLESS, 1))
                await reader.readuntil(b"data:")
                writer.transport.abort()
            while aborted(await client.get("/metrics")) < before + 5:
                await asyncio.sleep(0.02)
            assert (await client.get("/load")).json()["server_load"] == 0

    asyncio.run(main())


def aborted(metrics):
    (count,) = re.findall(r'request_success_total\{[^}]*"abort"[^}]*\} ([\d.]+)', metrics.text)
    return float(count)


def test_a_dead_core_ends_streams_with_an_error(folder):
    server = HashServer(folder, "process", ROOM["max_model_len"])

    async def main():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        send(writer, "/v1/completions", completion([5, 6], ENDLESS, 1))
        await reader.readuntil(b"\r\n\r\n")  # the head comes with the first token
        tasks = glob.glob(f"/proc/{server.popen.pid}/task/*/children")
        children = [int(pid) for path in tasks for pid in Path(path).read_text().split()]
        assert len(children) == 1
        os.kill(children[0], signal.SIGKILL)
        *_, error = events_of(await read_chunked(reader))
        assert error["error"]["message"] == "The engine is not running."
        writer.close()

    try:
        asyncio.run(main())
    finally:
        server.end(signal.SIGTERM)


def test_a_client_that_goes_away_while_its_stream_is_cancelled_is_no_error():
    """As with Ctrl-C: the task is cancelled, and the connection is lost before it runs again."""

    async def main():
        body, source = Mock(is_writable=True, is_gone=False), Mock(is_over=False)
        source.take.return_value = source.take_text.return_value = None
        stream = asyncio.ensure_future(PushedStream(b"data: 1\n\n", Mock(), source, body)({}, AsyncMock(), AsyncMock()))
        while not body.open.called:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.cancel()
        body.on_gone()
        with pytest.raises(asyncio.CancelledError):
            await stream
        source.close.assert_called_once_with()

    asyncio.run(main())


def test_long_events_are_written_in_pieces_between_which_others_have_their_turn():
    async def main():
        pieces = [b"data: ", *(b"%05d" % number * 200 for number in range(400)), b"\n\n"]
        answer, source = Mock(takes_text=False), Mock(is_over=False)
        answer.write.side_effect = [iter(pieces), b"data: short\n\n", iter(pieces)]
        answer.end = AsyncMock(return_value=b"data: [DONE]\n\n")
        outputs = [RequestOutput(str(number), None, [1], None, [], False) for number in range(3)]

        def take():
            output = outputs.pop(0) if outputs else None
            source.is_over = not outputs
            return output

        source.take.side_effect, source.take_text.return_value = take, None
        turns, written = [0], list[tuple[int, bytes]]()
        body = Mock(is_writable=True, is_gone=False)
        body.write.side_effect = lambda data: written.append((turns[0], data))

        async def send(message):
            written.append((turns[0], message.get("body", b"")))

        async def others():
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        await PushedStream(iter(pieces), answer, source, body)({}, AsyncMock(), send)
        task.cancel()
        long = b"".join(pieces)
        assert b"".join(data for _, data in written) == long * 2 + b"data: short\n\n" + long + b"data: [DONE]\n\n"
        assert max(len(data) for _, data in written) < 4 * AT_ONCE < len(long) / 10
        assert len({turn for turn, _ in written}) > 3 * len(long) // (4 * AT_ONCE)

    asyncio.run(main())


def test_a_streams_prompt_logprobs_are_those_of_the_whole_answer_however_long_they_are(monkeypatch):
    for module in (completions, long_bodies):
        monkeypatch.setattr(module, "AT_ONCE", 8)

    async def main():
        async with serve() as server:
            options = {"include_usage": True, "continuous_usage_stats": True}
            for more in ({}, {"stream_options": options}, {"prompt": [[97, 98, 99] * 9, list(range(97, 120))]}):
                fields = {"prompt": "a long prompt, of many tokens", "prompt_logprobs": 2, **more}
                whole = (await server.complete(**{**fields, "stream_options": None})).json()["choices"]
                events = events_of((await server.complete(**fields, stream=True)).content)
                told = [event["choices"][0] for event in events if event["choices"]]
                for choice in whole:
                    own = [each for each in told if each["index"] == choice["index"]]
                    assert own[0]["prompt_logprobs"] == choice["prompt_logprobs"]
                    assert text_of(events, choice["index"]) == choice["text"]

    asyncio.run(main())
