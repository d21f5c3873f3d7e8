"""Starting, disconnecting, draining: what happens around requests."""

import asyncio
from typing import Any

import pytest
import uvicorn
import uvicorn.server
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.http import decoding, http_protocol
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.errors import EngineDeadError

pytestmark = pytest.mark.anyio


class RawClient:
    """One request spoken in ASGI, so that the client can go away when the test says so."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: bytes,
        hold_after: int | None = None,
        reading: asyncio.Event | None = None,
        more_body: bool = False,
    ) -> None:
        self._hold_after = hold_after
        self._reading = reading
        self.sent: list[Any] = []
        self.news = asyncio.Event()
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more_body})
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("server", 80),
            "client": ("client", 1),
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()
        if self._reading is not None and len(self.sent) >= (self._hold_after or 0):
            await self._reading.wait()

    async def wait_for_messages(self, count: int) -> None:
        while len(self.sent) < count:
            self.news.clear()
            await self.news.wait()

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})


async def wait_until_started(engine: FakeAsyncLLM, count: int = 1) -> None:
    while len(engine.started) < count:
        engine.news.clear()
        await engine.news.wait()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_client_that_goes_away_before_the_first_token_aborts_its_request(path, stream):
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(0)
    state = ServerState(ServerSettings(), engine)
    body = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": %s}' % stream
    client = RawClient(build_app(state), path, body)
    await wait_until_started(engine)
    assert state.in_flight == 1
    client.disconnect()
    await client.task
    assert engine.aborted == [engine.started[0][0]]
    assert client.sent == [] and state.in_flight == 0 and state.idle.is_set()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_goes_away_within_a_stream_aborts_its_request(path):
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(2)
    state = ServerState(ServerSettings(), engine)
    body = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": true}'
    client = RawClient(build_app(state), path, body)
    await client.wait_for_messages(3)
    client.disconnect()
    await client.task
    assert engine.aborted == [engine.started[0][0]] and state.in_flight == 0


async def test_going_away_aborts_every_prompt_of_a_request():
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(0)
    app = build_app(ServerState(ServerSettings(), engine))
    for stream in (b"true", b"false"):
        engine.started.clear()
        engine.aborted.clear()
        client = RawClient(app, "/v1/completions", b'{"prompt": ["a", "b", "c"], "stream": %s}' % stream)
        await wait_until_started(engine, 3)
        client.disconnect()
        await client.task
        assert sorted(engine.aborted) == sorted(request_id for request_id, _, _ in engine.started)


async def test_a_stream_that_ends_aborts_nothing(server):
    async with server() as s:
        await s.chat(stream=True)
        await s.complete(stream=True, prompt=["a", "b"])
        assert s.engine.aborted == [] and s.state.in_flight == 0


async def test_while_starting_health_and_work_answer_503_and_the_version_is_there(server):
    async with server(ready=False) as s:
        for response in (
            await s.client.get("/health"),
            await s.client.get("/ready"),
            await s.client.get("/v1/models"),
            await s.chat(),
            await s.complete(),
        ):
            assert response.status_code == 503 and response.headers["retry-after"]
            assert response.json()["error"]["code"] == "unavailable"
        assert (await s.client.get("/version")).status_code == 200
        s.state.engine_or_none = s.engine
        assert (await s.client.get("/health")).status_code == 200
        assert (await s.client.get("/ready")).status_code == 200
        assert (await s.complete()).status_code == 200


async def test_while_draining_what_runs_ends_and_new_work_is_refused(server):
    async with server() as s:
        s.engine.gate = asyncio.Semaphore(1)
        running = asyncio.ensure_future(s.chat(stream=True))
        await wait_until_started(s.engine)
        s.state.draining = True
        assert (await s.client.get("/ready")).status_code == 503
        assert (await s.client.get("/health")).status_code == 200
        refused = await s.complete()
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert not s.state.idle.is_set()
        for _ in range(3):
            s.engine.gate.release()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await s.state.idle.wait()


async def test_health_fails_when_the_engine_is_dead(server):
    async with server() as s:
        s.engine.failure = EngineDeadError("gone")
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            response = await s.client.request(method, path)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "The engine is not running: gone."
        s.engine.errored = True
        assert (await s.client.get("/ready")).status_code == 503


async def test_load_counts_what_is_in_flight(server):
    async with server() as s:
        s.engine.gate = asyncio.Semaphore(0)
        running = asyncio.ensure_future(s.complete())
        await wait_until_started(s.engine)
        assert (await s.client.get("/load")).json() == {"server_load": 1}
        for _ in range(4):
            s.engine.gate.release()
        await running
        assert (await s.client.get("/load")).json() == {"server_load": 0}


async def test_a_reader_that_does_not_read_holds_the_generator_back():
    engine = FakeAsyncLLM()
    reading = asyncio.Event()
    app = build_app(ServerState(ServerSettings(), engine))
    body = b'{"prompt": "a", "stream": true, "max_tokens": 400}'
    client = RawClient(app, "/v1/completions", body, hold_after=3, reading=reading)
    await client.wait_for_messages(3)
    assert engine.yielded <= 3
    reading.set()
    await client.task
    assert client.sent[-1]["more_body"] is False
    assert sum(b'"text"' in message.get("body", b"") for message in client.sent) == 400


async def test_a_body_that_never_ends_is_a_408(monkeypatch):
    monkeypatch.setattr(decoding, "BODY_TIMEOUT_S", 0.0)
    state = ServerState(ServerSettings(), FakeAsyncLLM())
    client = RawClient(build_app(state), "/v1/completions", b'{"prompt":', more_body=True)
    await client.task
    assert client.sent[0]["status"] == 408 and state.in_flight == 0


async def test_a_connection_that_sends_no_head_is_closed(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.0)
    config = uvicorn.Config(build_app(ServerState(ServerSettings(), FakeAsyncLLM())), log_config=None, lifespan="off")
    config.load()
    loop = asyncio.get_running_loop()
    server_state = uvicorn.server.ServerState()
    listener = await loop.create_server(
        lambda: http_protocol.bounded_to(1 << 16, 256)(config, server_state, {}), "127.0.0.1", 0
    )
    async with listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        assert await reader.read() == b""
        writer.close()
