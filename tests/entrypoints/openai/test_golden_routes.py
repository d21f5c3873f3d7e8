"""Every route answers as it did when `golden_routes.json` was written: status, headers, and the shape of the body.

    python -m tests.entrypoints.openai.test_golden_routes    write the file anew

A shape is a body whose texts and numbers are replaced by their kind. Requests are those of the OpenAPI document's examples, and
what every server gets besides: wrong paths, methods, bodies, keys, and requests from other origins.
"""

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.oracles.fake_async_llm import FakeAsyncLLM, engine_config

from quire import LoRARequest
from quire.config.engine import LoRAConfig
from quire.entrypoints.http.openapi import build_openapi
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.operations import OPERATIONS
from quire.entrypoints.server.routes import WORK

GOLDEN = Path(__file__).with_name("golden_routes.json")
PIRATE = Path(__file__).parents[3] / "examples" / "demo_adapters" / "pirate"
OPEN = {"api_keys": ["secret"], "allowed_origins": ["http://friend"], "root_path": "/far"}
KEY = {"authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ODD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no such route": ("GET", "/v1/chats", {}),
    "no such route, posted": ("POST", "/v1/chat/completion", {"json": CHAT}),
    "a slash too many": ("POST", "/v1/chat/completions/", {"json": CHAT}),
    "wrong method": ("GET", "/v1/completions", {}),
    "wrong method of a kept response": ("PATCH", "/v1/responses/x", {}),
    "no JSON": ("POST", "/v1/completions", {"content": b"{"}),
    "no body": ("POST", "/v1/completions", {}),
    "unknown field": ("POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": 2, "surprise": 1}}),
    "wrong type": ("POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": "many"}}),
    "stream": ("POST", "/v1/chat/completions", {"json": {**CHAT, "stream": True}}),
    "stream of a completion": ("POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": 2, "stream": True}}),
    "Anthropic's stream": ("POST", "/v1/messages", {"json": {**CHAT, "stream": True}}),
    "stream of a response": ("POST", "/v1/responses", {"json": {"input": "a", "stream": True}}),
    "request id": ("POST", "/v1/completions", {"json": {"prompt": "a"}, "headers": {"x-request-id": "mine"}}),
    "HEAD": ("HEAD", "/health", {}),
    "OPTIONS": ("OPTIONS", "/v1/completions", {}),
    "model with a slash": ("GET", "/v1/models/a/b", {}),
    "console page": ("GET", "/", {}),
    "docs page": ("GET", "/docs", {}),
    "redoc page": ("GET", "/redoc", {}),
    "document": ("GET", "/openapi.json", {}),
    "failure within a route": ("GET", "/tokenizer_info", {}),
}
GUARDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no key": ("POST", "/far/v1/completions", {"json": {"prompt": "a"}}),
    "wrong key": ("POST", "/far/v1/completions", {"json": {"prompt": "a"}, "headers": {"x-api-key": "other"}}),
    "key": ("POST", "/far/v1/completions", {"json": {"prompt": "a", "max_tokens": 2}, "headers": KEY}),
    "key, below no root path": ("POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": 2}, "headers": KEY}),
    "open path": ("GET", "/far/health", {}),
    "another origin asks first": (
        "OPTIONS", "/far/v1/completions", {"headers": {"origin": "http://friend", "access-control-request-method": "POST"}}),
    "another origin": ("POST", "/far/v1/completions", {"json": {"prompt": "a"}, "headers": {**KEY, "origin": "http://friend"}}),
    "document below a root path": ("GET", "/far/openapi.json", {"headers": KEY}),
}  # fmt: skip


ADAPTER: dict[str, Any] = {"lora_name": "style", "lora_path": "/no/such/folder"}
ADAPTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "models, one an adapter": ("GET", "/v1/models", {}),
    "the model that is an adapter": ("GET", "/v1/models/style", {}),
    "chat of an adapter": ("POST", "/v1/chat/completions", {"json": {**CHAT, "model": "style"}}),
    "stream of an adapter's completion": (
        "POST", "/v1/completions", {"json": {"model": "style", "prompt": "a", "max_tokens": 2, "stream": True}}),
    "Anthropic's message of an adapter": ("POST", "/v1/messages", {"json": {**CHAT, "model": "style"}}),
    "response of an adapter": ("POST", "/v1/responses", {"json": {"model": "style", "input": "a"}}),
    "embedding of an adapter": ("POST", "/v1/embeddings", {"json": {"model": "style", "input": "a"}}),
    "tokens for an adapter": ("POST", "/tokenize", {"json": {"model": "style", "prompt": "a"}}),
    "chat of nobody's adapter": ("POST", "/v1/chat/completions", {"json": {**CHAT, "model": "stile"}}),
    "load where it is not allowed": ("POST", "/v1/load_lora_adapter", {"json": ADAPTER}),
    "unload where it is not allowed": ("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": "style"}}),
}  # fmt: skip
CHANGED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "load under a name that is taken": ("POST", "/v1/load_lora_adapter", {"json": ADAPTER}),
    "load without a path": ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "other"}}),
    "load from no folder": ("POST", "/v1/load_lora_adapter", {"json": {**ADAPTER, "lora_name": "other"}}),
    "load": ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "new", "lora_path": str(PIRATE)}}),
    "unload what is not there": ("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": "other"}}),
    "unload": ("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": "style"}}),
    "chat of what was unloaded": ("POST", "/v1/chat/completions", {"json": {**CHAT, "model": "style"}}),
}
"""In this order, where adapters may be changed."""


NEEDS_AN_ENGINE = (
    "/console/state",
    "/console/findings",
    "/console/requests/{id}",
    "/tokenizer_info",
    "/generative_scoring",
)
"""The fake engine cannot answer these."""


def shape(value: Any) -> Any:
    """The kinds of what a JSON value holds; of lists each kind once."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        kinds = [shape(inner) for inner in value]
        return [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    return type(value).__name__


def body_of(answer: httpx.Response) -> Any:
    kind = answer.headers.get("content-type", "")
    if answer.url.path.endswith("openapi.json"):
        document = answer.json()
        paths = {path: sorted(operations) for path, operations in document["paths"].items()}
        return {"paths": paths, "schemas": sorted(document["components"]["schemas"]), "others": sorted(document)}
    if kind.startswith("application/json"):
        return shape(answer.json()) if answer.content else ""
    if kind.startswith("text/event-stream"):
        events = [line.partition(": ")[2] for line in answer.text.splitlines() if line]
        return [shape(json.loads(event)) if event.startswith("{") else event for event in events]
    return re.sub(r"\d+(\.\d+)?", "N", answer.text)[:200] if kind.startswith("text/plain") else kind


async def ask(app: Any, method: str, path: str, options: dict[str, Any]) -> dict[str, Any]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.request(method, path, **options)
    headers = sorted(set(answer.headers) - {"content-length", "date"})
    found = {"status": answer.status_code, "headers": headers, "body": body_of(answer)}
    if answer.status_code >= 400 and answer.headers.get("content-type") == "application/json" and answer.content:
        error = answer.json().get("error", "")
        message = re.sub(r"[0-9a-f]{32}", "ID", error if isinstance(error, str) else error.get("message", ""))
        before, _, allowed = message.partition("; allowed: ")  # methods in any order
        found["error"] = [before, *sorted(allowed.rstrip(".").split(", "))]
    return found


class AdaptedLLM(FakeAsyncLLM):
    """The fake engine with adapters, any of which it takes."""

    def __init__(self) -> None:
        super().__init__(dataclasses.replace(engine_config(), lora=LoRAConfig()))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return True


def make_app(**options: Any) -> Any:
    return build_app(ServerState(ServerSettings(), FakeAsyncLLM()), **options)


async def answers() -> dict[str, Any]:
    """The answer to each request."""
    found: dict[str, Any] = {}
    plain, guarded = make_app(), make_app(**OPEN)
    for path, methods in build_openapi([*WORK, *OPERATIONS])["paths"].items():
        for method, operation in () if path in NEEDS_AN_ENGINE else methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"")}}
            options = {"json": content["application/json"]["example"]} if "application/json" in content else {}
            options = form if "multipart/form-data" in content else options
            name = f"{method.upper()} {path}"
            found[name] = await ask(plain, method.upper(), re.sub(r"{\w+}", "some", path), options)
    for name, (method, path, options) in ODD.items():
        found[name] = await ask(plain, method, path, options)
    for name, (method, path, options) in GUARDED.items():
        found[name] = await ask(guarded, method, path, options)
    settings = ServerSettings(lora_modules=[{"name": "style", "path": str(PIRATE)}])
    adapted = build_app(ServerState(settings, AdaptedLLM()))
    for name, (method, path, options) in ADAPTED.items():
        found[name] = await ask(adapted, method, path, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "1")
        for name, (method, path, options) in CHANGED.items():
            found[name] = await ask(adapted, method, path, options)
    return found


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return json.loads(json.dumps(asyncio.run(answers())))


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()) if GOLDEN.exists() else [])
def test_a_route_answers_as_it_did(now: dict[str, Any], name: str) -> None:
    assert now[name] == json.loads(GOLDEN.read_text())[name]


def test_every_route_is_among_them(now: dict[str, Any]) -> None:
    assert set(now) == set(json.loads(GOLDEN.read_text()))


if __name__ == "__main__":
    lines = [
        f"{json.dumps(name)}: {json.dumps(found, sort_keys=True)}" for name, found in asyncio.run(answers()).items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
