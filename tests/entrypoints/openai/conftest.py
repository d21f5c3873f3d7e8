"""Servers that several files ask: one in this process, the real application over a fake engine, reached through ASGI without a
socket; and one in a process of its own, on the demo model."""

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.oracles.demo_server import DemoServer
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app


@pytest.fixture(scope="session")
def plain_demo() -> Iterator[DemoServer]:
    """The demo model without further flags."""
    server = DemoServer()
    yield server
    assert server.end(signal.SIGTERM)[0] == 0


class InProcessServer:
    """A client and what is behind it."""

    def __init__(self, client: httpx.AsyncClient, state: ServerState, engine: FakeAsyncLLM) -> None:
        self.client = client
        self.state = state
        self.engine = engine

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, **fields})


@asynccontextmanager
async def serve(
    engine: FakeAsyncLLM | None = None, settings: ServerSettings | None = None, ready: bool = True, **app: Any
) -> AsyncIterator[InProcessServer]:
    engine = engine or FakeAsyncLLM()
    state = ServerState(settings or ServerSettings(), engine if ready else None)
    transport = httpx.ASGITransport(build_app(state, **app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield InProcessServer(client, state, engine)


@pytest.fixture
def server() -> Callable[..., Any]:
    """`async with server(...) as s` gives an `InProcessServer`."""
    return serve


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio, as the server does."""
    return "asyncio"
