"""A client names an adapter that the table has; a name that it does not have is none."""

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app


def test_an_adapter_of_the_table_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, table = tmp_path / "adapter", tmp_path / "table.json"
    table.write_text(json.dumps({"mine": str(folder)}))
    monkeypatch.setenv("HAZEL_TABLE", str(table))
    monkeypatch.setenv("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "1")
    state = ServerState(ServerSettings())
    with TestClient(build_app(state)) as client:
        state.engine_or_none = engine = AsyncLLM.from_engine_args(AsyncEngineArgs(enable_lora=True, max_model_len=64))
        try:
            client.portal.call(engine.collective_rpc, "write_random_adapter", None, [str(folder), 4])
            body = {"model": "mine", "prompt": "a", "max_tokens": 2}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert "mine" in {model["id"] for model in client.get("/v1/models").json()["data"]}
            assert client.post("/v1/completions", json=body | {"model": "yours"}).status_code == 404
        finally:
            engine.shutdown()
