"""Data go in and answers come out, offline and over HTTP; data that cannot be used are refused."""

import pytest
from starlette.testclient import TestClient

from quire import LLM
from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.errors import RequestError

OPTIONS = {"runner": "pooling", "convert": "embed", "max_model_len": 512, "io_processor_plugin": "yew"}
NAMES = {"names": ["a red apple", "the capital of France", "a red apple pie"]}


def test_data_become_an_answer_offline() -> None:
    llm = LLM(**OPTIONS)
    [output] = llm.encode({"data": NAMES})
    assert len(output.outputs["nearest"]) == 3 and output.outputs["nearest"][0] == 2
    with pytest.raises(RequestError, match="data cannot be used: it must have 'names'"):
        llm.encode({"data": {"names": ["one"]}})


def test_data_become_an_answer_over_http() -> None:
    state = ServerState(ServerSettings())
    with TestClient(build_app(state)) as client:
        state.engine_or_none = engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**OPTIONS))
        try:
            answer = client.post("/pooling", json={"data": NAMES})
            assert answer.status_code == 200, answer.text
            assert answer.json()["data"]["nearest"][0] == 2
            refused = client.post("/pooling", json={"data": 3})
            assert refused.status_code == 400 and "it must have 'names'" in refused.text
        finally:
            engine.shutdown()
