"""The Ray Serve application: an engine that lives as long as its ASGI server, and, where Ray is installed, behind Ray's proxy."""

import asyncio
import importlib.util
import socket
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.entrypoints import ray_serve
from quire.entrypoints.ray_serve import ServedEngine, build_app
from quire.errors import ConfigError, EngineDeadError

FLAGS: dict[str, Any] = {"kv-cache-memory-bytes": "64M", "max-model-len": 2048, "device": "cpu"}
CHAT = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
ANSWER = "17 + 25 = 42"


def test_an_engine_lives_as_long_as_its_asgi_server() -> None:
    app = ServedEngine(ray_serve.flag_words(FLAGS))
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/chat/completions", json=CHAT).json()
        assert answer["choices"][0]["message"]["content"].strip() == ANSWER
        asyncio.run(app.check_health())
        engine = app._state.engine
        engine._die("somebody killed it")
        with pytest.raises(EngineDeadError, match="somebody killed it"):
            asyncio.run(app.check_health())
    assert engine.is_stopped


def test_an_engine_that_cannot_start_says_why_to_its_asgi_server() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = ServedEngine(ray_serve.flag_words({"model": "/no/such/model"}))
    asyncio.run(app({"type": "lifespan"}, receive, send))
    assert sent[0]["type"] == "lifespan.startup.failed" and "/no/such/model" in sent[0]["message"]


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray Serve is not installed; install it with"):
        build_app(FLAGS)


@pytest.mark.exhaustive
def test_two_replicas_answer_behind_rays_proxy_and_wrong_flags_are_refused_before() -> None:
    serve, ray = (pytest.importorskip(name) for name in ("ray.serve", "ray"))
    from openai import OpenAI

    with pytest.raises(ConfigError, match="max_num_seqs"):
        build_app({**FLAGS, "max-num-seqs": -1})
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"port": port, "host": "127.0.0.1"})
        app = build_app({**FLAGS, "deployment": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}})
        serve.run(app)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        messages: Any = CHAT["messages"]
        for _ in range(4):
            parts = client.chat.completions.create(model="quire-demo", messages=messages, temperature=0, stream=True)
            assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices).strip() == ANSWER
    finally:
        serve.shutdown()
        ray.shutdown()
