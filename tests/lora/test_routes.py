"""Adapters over HTTP: routes that pool, and adapters of virtual tokens, whose names are a request's `model`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from starlette.testclient import TestClient
from tests.lora.conftest import PROMPTS, request
from tests.lora.test_bases import expected_vector
from tests.oracles.peft_adapters import make_adapter, make_virtual, randomize
from tests.oracles.tiny_models import make_tiny_model
from tests.oracles.tiny_poolers import load_pooling_oracle

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app

SETTINGS: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_model_len": 64, "max_num_seqs": 8}
Serve = Callable[..., AbstractContextManager[TestClient]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@contextmanager
def serve(base: Path, adapters: list[Path], **settings: Any) -> Iterator[TestClient]:
    """A server of a model and of these adapters, under their folders' names."""
    state = ServerState(ServerSettings(lora_modules=[{"name": path.name, "path": str(path)} for path in adapters]))
    with TestClient(build_app(state)) as client:
        args = AsyncEngineArgs(model=str(base), served_model_name="base", **SETTINGS, **settings)
        state.engine_or_none = engine = AsyncLLM.from_engine_args(args)
        try:
            yield client
        finally:
            engine.shutdown()


def post(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_routes_that_pool_take_an_adapter_as_their_model(llama: Path, tmp_path: Path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="FEATURE_EXTRACTION")
    model = peft.get_peft_model(load_pooling_oracle(llama, "LlamaModel"), config)
    randomize(model, 1, 0.3)
    model.save_pretrained(str(tmp_path / "style"))
    virtual = make_virtual(llama, tmp_path / "virtual", "PROMPT_TUNING")
    prompt = list(PROMPTS[0])
    with serve(llama, [tmp_path / "style", virtual], runner="pooling", convert="embed") as client:
        for name, path in (("style", tmp_path / "style"), ("base", None)):
            expected = expected_vector(llama, "LlamaModel", path, prompt)
            embedded = post(client, "/v1/embeddings", model=name, input=[prompt, prompt])
            pooled = post(client, "/pooling", model=name, input=prompt)
            assert embedded["model"] == pooled["model"] == name
            for found in (*(each["embedding"] for each in embedded["data"]), pooled["data"][0]["data"]):
                np.testing.assert_allclose(np.array(found), expected, atol=1e-4)
        refused = client.post("/v1/embeddings", json={"model": "virtual", "input": prompt})
        assert refused.status_code == 400 and "models that pool do not take" in refused.json()["error"]["message"]
        unknown = client.post("/v1/embeddings", json={"model": "nobody", "input": prompt})
        assert unknown.status_code == 404


def test_virtual_tokens_are_computed_for_clients_and_counted_as_none_of_theirs(llama: Path, tmp_path: Path):
    kinds = ("PROMPT_TUNING", "PREFIX_TUNING")
    paths = [make_virtual(llama, tmp_path / kind, kind, seed) for seed, kind in enumerate(kinds)]
    paths.append(make_adapter(llama, tmp_path / "LORA", 3, r=4, target_modules="all-linear"))
    prompt, params = list(range(20, 56)), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm = LLM(str(llama), **SETTINGS)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt}] * 3, params, lora_request=[request(path) for path in paths], use_tqdm=False
    )
    expected = {path.name: output.outputs[0].token_ids for path, output in zip(paths, outputs, strict=True)}
    assert len({tuple(token_ids) for token_ids in expected.values()}) == 3
    body = {"prompt": [prompt] * 2, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    with serve(llama, paths) as client:
        for name, token_ids in expected.items():
            for _ in range(2):  # once more, from the prefix cache
                answer = post(client, "/v1/completions", model=name, **body)
                assert [choice["token_ids"] for choice in answer["choices"]] == [token_ids] * 2
                assert answer["choices"][0]["prompt_token_ids"] == prompt
                assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (72, 12)
        cards = {card["id"]: card["parent"] for card in client.get("/v1/models").json()["data"]}
        assert cards == {"base": None, **dict.fromkeys(expected, "base")}
