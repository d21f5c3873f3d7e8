"""`POST /v1/embeddings` over a real model: what clients send, and what they get."""

import asyncio
import base64
import json

import numpy as np
import pytest
from tests.entrypoints.openai.conftest import serve
from tests.oracles.fake_async_llm import FakeAsyncLLM
from tests.oracles.tiny_models import make_tiny_model

from quire import AsyncEngineArgs, AsyncLLMEngine, PoolingParams

from .conftest import SETTINGS

TEXTS = ["one two three", "the quick brown fox", "x"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("http"))
    settings = SETTINGS | {"skip_tokenizer_init": False, "hf_overrides": {"is_matryoshka": True}}
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(path), **settings), core="inproc")
    yield engine
    engine.shutdown()


def ask(engine, path="/v1/embeddings", **body):
    async def main():
        async with serve(engine) as server:
            return await server.client.post(path, json=body)

    return asyncio.run(main())


def vectors(response):
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def test_texts_and_their_token_ids_give_the_same_vectors(engine):
    response = ask(engine, input=TEXTS)
    answer, tokenizer = response.json(), engine.get_tokenizer()
    token_ids = [tokenizer.encode(text) for text in TEXTS]
    count = sum(map(len, token_ids))
    assert answer["object"] == "list" and answer["usage"] == {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2] and answer["model"] == engine.config.model.model
    found = np.array(vectors(response))
    assert found.shape == (3, 64)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors(ask(engine, input=token_ids)), found, atol=1e-6)
    np.testing.assert_allclose(vectors(ask(engine, input=token_ids[0])), found[:1], atol=1e-6)
    np.testing.assert_allclose(vectors(ask(engine, input=TEXTS[0])), found[:1], atol=1e-6)


def test_base64_holds_the_same_numbers(engine):
    numbers = np.array(vectors(ask(engine, input=TEXTS)))
    encoded = vectors(ask(engine, input=TEXTS, encoding_format="base64"))
    decoded = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in encoded]
    np.testing.assert_allclose(np.array(decoded), numbers, atol=1e-6)


def test_dimensions_and_normalize_are_the_requests_own(engine):
    (whole,) = vectors(ask(engine, input="x", normalize=False))
    (short,) = vectors(ask(engine, input="x", dimensions=8))
    assert abs(np.linalg.norm(whole) - 1) > 0.1
    np.testing.assert_allclose(short, np.array(whole[:8]) / np.linalg.norm(whole[:8]), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [5, "x"]}, "input"),
        ({"input": "x" * 1000}, "input"),
        ({"input": ""}, "input"),
        ({"input": [100000]}, "input"),
        ({"input": "x", "dimensions": 65}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({}, "input"),
        ({"input": ["x", "y" * 1000, "z"]}, "input"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body, param, engine):
    response = ask(engine, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    assert len(vectors(ask(engine, input="x"))) == 1


def test_an_embedding_server_refuses_to_generate(engine):
    response = ask(engine, "/v1/completions", prompt="x", max_tokens=2)
    assert response.status_code == 400 and "runs as a pooling model" in response.json()["error"]["message"]


def test_a_reader_that_goes_takes_its_request_along(engine):
    async def main():
        async def read():
            async for _ in engine.encode({"prompt_token_ids": [5] * 100}, PoolingParams(), "gone"):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0)  # it is queued, and waits
        assert engine.get_num_unfinished_requests() == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.get_num_unfinished_requests() == 0
        return [output async for output in engine.encode({"prompt_token_ids": [5]}, PoolingParams(), "next")]

    assert len(asyncio.run(main())) == 1


def test_the_openapi_page_knows_the_route():
    async def main():
        async with serve(FakeAsyncLLM()) as server:
            return (await server.client.get("/openapi.json")).json()

    document = asyncio.run(main())
    schema = document["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "EmbeddingRequest" in json.dumps(schema)
