"""A server over a real engine whose length is left to the memory: what it says of it, and calls of the workers' methods."""

import httpx
import pytest

from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_the_workers_methods_may_be_called_and_what_cannot_be_is_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_SERVER_DEV_MODE", "1")
    args = AsyncEngineArgs(
        max_model_len="auto", max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 20, cpu_threads=1
    )
    engine = AsyncLLM.from_engine_args(args)
    transport = httpx.ASGITransport(build_app(ServerState(ServerSettings(), engine)))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            called = await client.post("/collective_rpc", json={"method": "waited_seconds", "timeout": 30})
            assert called.status_code == 200 and len(called.json()["results"]) == 1
            for name in ("no_such_method", "_timings"):
                refused = await client.post("/collective_rpc", json={"method": name})
                assert refused.status_code == 400, refused.text
                assert refused.json()["error"]["param"] == "method" and name in refused.json()["error"]["message"]
            length = engine.model_config.max_model_len
            assert 32 < length < 4096
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert model["max_model_len"] == length
            body = {"prompt": [5] * 8, "max_tokens": length}
            too_long = await client.post("/v1/completions", json=body)
            assert too_long.status_code == 400 and str(length) in too_long.json()["error"]["message"]
            whole = await client.post("/v1/completions", json={**body, "max_tokens": length - 8, "ignore_eos": True})
            assert whole.json()["usage"]["completion_tokens"] == length - 8
    finally:
        engine.shutdown()
