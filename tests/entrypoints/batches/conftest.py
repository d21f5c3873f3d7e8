"""A server with batches in this process, asked by OpenAI's own client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.batches.beside import serve_batches
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app

OVER = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, prompt: str = "ab", url: str = "/v1/completions", **body: Any) -> bytes:
    """A line of an input file."""
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"prompt": prompt, "max_tokens": 4, **body},
    }
    return json.dumps(request).encode() + b"\n"


class BatchServer:
    """A client, and what is behind it."""

    def __init__(self, http: httpx.AsyncClient, state: ServerState, engine: FakeAsyncLLM, key: str) -> None:
        self.http = http
        self.state = state
        self.engine = engine
        self.client = openai.AsyncOpenAI(base_url="http://server/v1", api_key=key, http_client=http, max_retries=0)

    async def upload(self, *lines: bytes, **options: Any) -> Any:
        return await self.client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch", **options)

    async def begin(self, *lines: bytes, endpoint: Any = "/v1/completions", **options: Any) -> Any:
        file = await self.upload(*lines)
        options = {"completion_window": "24h", **options}
        return await self.client.batches.create(input_file_id=file.id, endpoint=endpoint, **options)

    async def status(self, batch: Any, *statuses: str) -> Any:
        """The batch, once it has one of these."""
        while (found := await self.client.batches.retrieve(batch.id)).status not in statuses:
            await asyncio.sleep(0.005)
        return found

    async def over(self, batch: Any) -> Any:
        return await self.status(batch, *OVER)

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(each) for each in (await self.client.files.content(file_id)).content.splitlines()]


@contextlib.asynccontextmanager
async def serve(
    folder: Path, engine: FakeAsyncLLM | None = None, keys: tuple[str, ...] = (), runs: bool = True, **settings: Any
) -> AsyncIterator[BatchServer]:
    engine = engine or FakeAsyncLLM()
    state = ServerState(ServerSettings(batch_store=str(folder), **settings), engine)
    app = build_app(state, api_keys=keys)
    assert state.batches is not None
    running = asyncio.create_task(serve_batches(app, state, state.batches)) if runs else None
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            yield BatchServer(http, state, engine, keys[0] if keys else "none")
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        state.batches.close()


@pytest.fixture
def server(tmp_path: Path) -> Callable[..., Any]:
    """`async with server() as s` gives a `BatchServer` on one folder."""
    return lambda **options: serve(tmp_path / "store", **options)


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio, as the server does."""
    return "asyncio"
