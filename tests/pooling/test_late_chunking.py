"""Late chunking: a text is computed whole, and its chunks' vectors are the head's of the means of their tokens."""

import asyncio
import json

import numpy as np
import pytest
from tests.entrypoints.openai.conftest import serve
from tests.oracles.tiny_models import make_tiny_model
from tokenizers.processors import TemplateProcessing

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine, PoolingParams
from quire.errors import RequestError
from quire.pooling_params import LateChunkingParams
from tokenizers import Tokenizer

from .conftest import SETTINGS

TEXT = "passage: Übermut and naïveté are words of two or more tokens, as is zweifellos."
TOKENS = {"pooler_config": {"task": "token_embed"}, "skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("late")))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **(SETTINGS | TOKENS | {"max_num_batched_tokens": 16, "max_num_seqs": 4})) as llm:
        yield llm


def chunked(size):
    return PoolingParams(late_chunking_params=LateChunkingParams(chunk_size=size))


@pytest.mark.parametrize("size", [1, 5, 16, 10**6])
def test_a_chunk_is_the_mean_of_its_tokens_and_says_which_they_are(llm, size):
    raw, normal = PoolingParams(use_activation=False), chunked(size)
    (tokens,) = llm.embed(TEXT, pooling_params=raw, use_tqdm=False)
    (output,) = llm.embed(TEXT, pooling_params=normal, use_tqdm=False)
    told, count = output.late_chunking, len(output.prompt_token_ids)
    assert tokens.late_chunking is None
    assert (told.chunk_size, told.input_tokens, told.strategy) == (size, count, "fixed_tokens")
    assert [chunk.token_range for chunk in told.chunks] == [(at, min(at + size, count)) for at in range(0, count, size)]
    means = np.stack([tokens.outputs.data[slice(*chunk.token_range)].mean(axis=0) for chunk in told.chunks])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(output.outputs.data, expected, atol=1e-5)
    tokenizer = llm.get_tokenizer()
    for chunk in told.chunks:
        written = TEXT[slice(*chunk.char_range)]
        decoded = tokenizer.decode(output.prompt_token_ids[slice(*chunk.token_range)])
        assert decoded.strip("\ufffd ") in written  # a character that is divided belongs to both chunks
    assert told.chunks[0].char_range[0] == 0 and told.chunks[-1].char_range[1] == len(TEXT)


def test_a_chunk_of_special_tokens_has_no_characters(tmp_path):
    path = make_tiny_model("BertModel", tmp_path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    around = [("<|begin|>", 3), ("<|end|>", 4)]
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A <|end|>", special_tokens=around)
    tokenizer.save(str(path / "tokenizer.json"))
    with LLM(str(path), **(SETTINGS | TOKENS | {"max_num_batched_tokens": 128})) as llm:
        (output,) = llm.embed("ab", pooling_params=chunked(1), use_tqdm=False)
    ranges = [chunk.char_range for chunk in output.late_chunking.chunks]
    assert ranges[0] is None and ranges[-1] is None and None not in ranges[1:-1]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ({"prompt_token_ids": [5, 6, 7]}, {}, "a prompt of text"),
        (TEXT, {"truncate_prompt_tokens": 4}, "leave truncate_prompt_tokens out"),
        (TEXT, {"step_tag_id": 4}, "leave step_tag_id out"),
    ],
)
def test_what_cannot_be_divided_is_refused(llm, prompt, params, message):
    with pytest.raises(RequestError, match=message) as error:
        llm.embed(prompt, pooling_params=PoolingParams(late_chunking_params={"chunk_size": 4}, **params))
    assert error.value.param == "late_chunking_params"


@pytest.mark.parametrize("wrong", [{"chunk_size": 0}, {"chunk_size": True}, {"chunk_size": 1.5}, {"size": 3}, 5, {}])
def test_sizes_are_whole_numbers_from_1(wrong):
    with pytest.raises(RequestError, match="whole number from 1"):
        PoolingParams(late_chunking_params=wrong)


def ask(engine, **body):
    async def main():
        async with serve(engine) as server:
            return await server.client.post("/v1/embeddings", json=body)

    return asyncio.run(main())


def test_the_route_answers_with_a_matrix_and_the_ranges(folder, llm):
    args = AsyncEngineArgs(model=folder, **(SETTINGS | TOKENS))
    engine = AsyncLLMEngine.from_engine_args(args, core="inproc")
    try:
        answer = ask(engine, input=[TEXT, "x"], late_chunking_params={"chunk_size": 8})
        plain = ask(engine, input="x")
        wrong = ask(engine, input=TEXT, late_chunking_params={"chunk_size": "eight"})
    finally:
        engine.shutdown()
    first, second = answer.json()["data"]
    (expected,) = llm.embed(TEXT, pooling_params=chunked(8), use_tqdm=False)
    np.testing.assert_allclose(first["embedding"], expected.outputs.data, atol=1e-5)
    assert first["late_chunking"]["chunks"][0] == {
        "token_range": [0, 8],
        "char_range": list(expected.late_chunking.chunks[0].char_range),
    }
    assert len(second["embedding"]) == 1
    assert "late_chunking" not in plain.json()["data"][0] and np.array(plain.json()["data"][0]["embedding"]).ndim == 2
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "late_chunking_params.chunk_size"


def test_a_model_of_one_vector_refuses_it(folder):
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(model=folder, **(SETTINGS | {"skip_tokenizer_init": False})), core="inproc"
    )
    try:
        answer = ask(engine, input=TEXT, late_chunking_params={"chunk_size": 8})
    finally:
        engine.shutdown()
    assert answer.status_code == 400 and "pooler_config.task" in json.dumps(answer.json())
