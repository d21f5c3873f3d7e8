"""Texts that are longer than the model reads are embedded in pieces, over HTTP and offline."""

import asyncio

import numpy as np
import pytest
from tests.entrypoints.openai.conftest import serve
from tests.oracles.tiny_models import make_tiny_model
from tests.pooling.conftest import SETTINGS

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine
from quire.config.pooling import PoolerConfig
from quire.errors import ConfigError, RequestError

LIMIT = SETTINGS["max_model_len"]
LONG = [4 + (7 * index) % 290 for index in range(2 * LIMIT + 50)]
PIECES = [LONG[:LIMIT], LONG[LIMIT : 2 * LIMIT], LONG[2 * LIMIT :]]
CHUNKED = {"enable_chunked_processing": True, "max_embed_len": 3 * LIMIT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("embeds"))


def expected_of(pieces, vectors):
    """The mean by tokens, of length 1."""
    mean = np.average(np.array(vectors), axis=0, weights=[len(piece) for piece in pieces])
    return mean / np.linalg.norm(mean)


def test_the_vectors_of_the_pieces_are_averaged_by_their_tokens(folder):
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(model=str(folder), **SETTINGS | {"pooler_config": CHUNKED}), core="inproc"
    )

    async def post(path, **body):
        async with serve(engine) as server:
            return await server.client.post(path, json=body)

    def answer(path, **body):
        response = asyncio.run(post(path, **body))
        assert response.status_code == 200, response.text
        return response.json()

    try:
        alone = answer("/v1/embeddings", input=PIECES)
        vectors = [entry["embedding"] for entry in alone["data"]]
        told = answer("/v1/embeddings", input=[PIECES[0], LONG])
        np.testing.assert_allclose(told["data"][0]["embedding"], vectors[0], atol=1e-6)
        np.testing.assert_allclose(told["data"][1]["embedding"], expected_of(PIECES, vectors), atol=1e-5)
        assert told["usage"]["prompt_tokens"] == LIMIT + len(LONG) and told["usage"]["completion_tokens"] == 0
        raw = answer("/pooling", input=[LONG], task="embed", use_activation=False)["data"][0]["data"]
        parts = [answer("/pooling", input=[piece], task="embed", use_activation=False) for piece in PIECES]
        mean = np.average([part["data"][0]["data"] for part in parts], axis=0, weights=list(map(len, PIECES)))
        np.testing.assert_allclose(raw, mean, atol=1e-4)
        cut = answer("/v1/embeddings", input=[LONG], truncate_prompt_tokens=-1)
        assert cut["usage"]["prompt_tokens"] == LIMIT
        error = asyncio.run(post("/v1/embeddings", input=[LONG * 2])).json()["error"]
        assert error["param"] == "input" and f"{3 * LIMIT} tokens" in error["message"]
        error = asyncio.run(post("/pooling", input=[LONG], task="token_embed")).json()["error"]
        assert error["code"] == "context_length_exceeded"
    finally:
        engine.shutdown()


def test_offline_a_long_text_is_embedded_in_pieces_too(folder):
    llm = LLM(str(folder), **SETTINGS, pooler_config=PoolerConfig(enable_chunked_processing=True))
    prompts = [{"prompt_token_ids": ids} for ids in (LONG, *PIECES)]
    (whole, *parts) = llm.embed(prompts, use_tqdm=False)
    expected = expected_of(PIECES, [part.outputs.embedding for part in parts])
    np.testing.assert_allclose(whole.outputs.embedding, expected, atol=1e-5)
    assert whole.prompt_token_ids == LONG


def test_a_limit_without_pieces_only_refuses_more(folder):
    llm = LLM(str(folder), **SETTINGS, pooler_config={"max_embed_len": 20})
    assert len(llm.embed({"prompt_token_ids": [5] * 20}, use_tqdm=False)) == 1
    with pytest.raises(RequestError, match="max_embed_len"):
        llm.embed({"prompt_token_ids": [5] * 21}, use_tqdm=False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"enable_chunked_processing": 1}, "True, False or None"),
        ({"max_embed_len": -1}, "a whole number"),
    ],
)
def test_wrong_values_are_refused(folder, config, words):
    with pytest.raises(ConfigError, match=words):
        AsyncEngineArgs(model=str(folder), pooler_config=config).create_engine_config()


def test_a_classifier_embeds_nothing_in_pieces(tmp_path):
    path = make_tiny_model("Qwen3ForSequenceClassification", tmp_path, num_labels=2)
    with pytest.raises(ConfigError, match="is for embeddings"):
        AsyncEngineArgs(model=str(path), pooler_config={"enable_chunked_processing": True}).create_engine_config()
