"""Formats whose markers are special tokens, on a real engine: a model of random weights is made to call."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app

pytest.importorskip("mistral_common")

SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "to": {"enum": ["a", "é"]}},
    "required": ["on", "to"],
}
TOOLS = [{"type": "function", "function": {"name": "switch", "parameters": SWITCH}}]


def write_tekken(folder: Path) -> Path:
    """Bytes alone, and Mistral's control tokens."""
    folder.mkdir()
    vocab = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    config: dict[str, Any] = {"pattern": r"\s|\S+", "num_vocab_tokens": 256, "default_vocab_size": 296, "version": "v3"}
    config["default_num_special_tokens"] = 40
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    return folder


async def ask(client: httpx.AsyncClient, **fields: Any) -> tuple[str, list[tuple[str, str]]]:
    """(finish reason, calls), which are the same whole and streamed."""
    body = {"messages": [{"role": "user", "content": "[TOOL_CALLS] now"}], "tools": TOOLS, "max_tokens": 150, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] is None
    whole = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    calls: list[list[str]] = []
    for line in stream.text.splitlines():
        if line.startswith("data: {"):
            for call in json.loads(line[6:])["choices"][0]["delta"].get("tool_calls", ()):
                function = call["function"]
                calls += [[function["name"], ""]] if function.get("name") else []
                calls[call["index"]][1] += function.get("arguments") or ""
    assert [tuple(call) for call in calls] == whole
    return choice["finish_reason"], whole


@pytest.mark.anyio
@pytest.mark.parametrize("parser", ["mistral", "none"])
async def test_a_random_model_calls_as_it_must(tmp_path: Path, parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    args = EngineArgs(
        model=str(make_tiny_model("LlamaForCausalLM", tmp_path / "model")), tokenizer=str(write_tekken(tmp_path / "tekken")),
        tokenizer_mode="mistral", dtype="float32", max_model_len=512, kv_cache_memory_bytes=16 << 20,
    )  # fmt: skip
    engine = AsyncLLM(args.create_engine_config(), core="inproc")
    try:
        state = ServerState(ServerSettings(tool_call_parser=parser, reasoning_parser="none"), engine)
        transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120) as client:
            for seed in range(3):
                named = {"type": "function", "function": {"name": "switch"}}
                reason, calls = await ask(client, tool_choice=named, temperature=1.0, seed=seed)
                assert (reason, len(calls)) == ("stop", 1)
                assert calls[0][0] == "switch"
                jsonschema.validate(json.loads(calls[0][1]), SWITCH)
            fields: dict[str, Any] = {
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "temperature": 1.0,
                "seed": 9,
            }
            assert (await ask(client, **fields))[0] == "tool_calls"
    finally:
        engine.shutdown()
