"""A server that the operator starts with the plugin's name has the route; another has not."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app


def client(keys: list[str]) -> TestClient:
    state = ServerState(ServerSettings())
    model = SimpleNamespace(model="demo", max_model_len=512)
    cast(Any, state).engine_or_none = SimpleNamespace(config=SimpleNamespace(model=model))
    return TestClient(build_app(state, api_keys=keys), raise_server_exceptions=False)


def test_the_route_answers_behind_the_servers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PLUGINS", "spruce")
    server = client(["secret"])
    assert server.get("/spruce").status_code == 401
    answer = server.get("/spruce", headers={"Authorization": "Bearer secret"})
    assert answer.json() == {"model": "demo", "tokens": 512}


def test_without_the_operators_word_there_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)
    assert client([]).get("/spruce").status_code == 404
