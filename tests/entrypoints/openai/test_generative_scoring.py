"""`/generative_scoring`: probabilities of tokens that might come next, of the demo model."""

import asyncio
import math

import pytest
from tests.entrypoints.openai.conftest import serve

from quire import AsyncEngineArgs, AsyncLLMEngine

PATH = "/generative_scoring"
BODY = {"query": "What is 2 + 3? ", "items": ["It is", "Nobody knows. It", "5"], "label_token_ids": [60, 61, 100]}


@pytest.fixture(scope="module")
def engine():
    args = AsyncEngineArgs(model=None, max_model_len=64, num_gpu_blocks_override=200, max_num_seqs=8)
    engine = AsyncLLMEngine.from_engine_args(args, core="inproc")
    yield engine
    engine.shutdown()


def post(engine, path, **body):
    async def main():
        async with serve(engine) as server:
            return await server.client.post(path, json=body)

    return asyncio.run(main())


def logprob(engine, prompt, token_id):
    """Of a token that stands behind a prompt, as the model scores prompts."""
    echoed = {"prompt": [*prompt, token_id], "max_tokens": 0, "echo": True, "logprobs": 0}
    return post(engine, "/v1/completions", **echoed).json()["choices"][0]["logprobs"]["token_logprobs"][-1]


@pytest.mark.parametrize("item_first", [False, True])
def test_a_score_is_the_first_label_s_probability(engine, item_first):
    tokenizer = engine.get_tokenizer()
    query = tokenizer.encode(BODY["query"], add_special_tokens=True)
    true = post(engine, PATH, **BODY, item_first=item_first, apply_softmax=False).json()
    among = post(engine, PATH, **BODY, item_first=item_first).json()
    assert [one["index"] for one in true["data"]] == [0, 1, 2]
    tokens = 0
    for index, item in enumerate(BODY["items"]):
        item = tokenizer.encode(item, add_special_tokens=False)
        prompt = item + query if item_first else query + item
        tokens += len(prompt)
        likely = [math.exp(logprob(engine, prompt, label)) for label in BODY["label_token_ids"]]
        assert true["data"][index]["score"] == pytest.approx(likely[0], rel=1e-3)
        assert among["data"][index]["score"] == pytest.approx(likely[0] / sum(likely), rel=1e-3)
    assert true["usage"]["prompt_tokens"] == tokens and true["usage"]["completion_tokens"] == 3


def test_token_ids_are_taken_as_texts_are_and_long_prompts_keep_their_beginning(engine):
    tokenizer = engine.get_tokenizer()
    ids = {"query": tokenizer.encode(BODY["query"]), "items": [tokenizer.encode(i, False) for i in BODY["items"]]}
    assert post(engine, PATH, **BODY | ids).json()["data"] == post(engine, PATH, **BODY).json()["data"]
    long = post(engine, PATH, **BODY | {"query": [70] * 90}).json()
    assert long["usage"]["prompt_tokens"] == 3 * 63 and len({one["score"] for one in long["data"]}) == 1


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"label_token_ids": []}, "label_token_ids", "empty"),
        ({"label_token_ids": [1, 10**6]}, "label_token_ids", "1000000"),
        ({"label_token_ids": [1] * 2000}, "label_token_ids", "at most"),
        ({"items": []}, "items", "0 items"),
        ({"items": ["a"] * 1025}, "items", "1025 items"),
        ({"items": ["a", [-1]]}, "items[1]", "-1"),
        ({"query": [], "items": ["a", ""]}, "items[1]", "no tokens"),
        ({"query": None}, "query", "query"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt"),
        ({"model": "other"}, "model", "other"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(engine, fields, param, words):
    refused = post(engine, PATH, **BODY | fields)
    error = refused.json()["error"]
    assert refused.status_code in (400, 404) and error["param"] == param and words in error["message"]
