"""Pooling on a device that works beside the host: two steps in flight, captured steps, the same numbers."""

import numpy as np
import pytest
import torch
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.tiny_poolers import hidden_states, load_pooling_oracle, logits, pooled

from quire import LLM, PoolingParams
from quire.executor import selector

from .conftest import SETTINGS, as_dicts


@pytest.fixture
def beside_the_host(monkeypatch):
    platform = AsyncCpuPlatform()
    monkeypatch.setattr(selector, "current_platform", lambda _name: platform)
    return platform


CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("kind", "settings"), [("last", {}), ("mean", CHUNKS), ("max", {"enforce_eager": True} | CHUNKS)]
)
def test_a_decoders_embeddings_are_the_same(kind, settings, beside_the_host, tiny, prompts):
    path = tiny("LlamaForCausalLM")
    oracle = load_pooling_oracle(path, "LlamaForCausalLM")
    config = {"seq_pooling_type": kind, "use_activation": False}
    options = SETTINGS | {"async_scheduling": True, "pooler_config": config, "runner": "pooling"} | settings
    expected = [pooled(hidden_states(oracle, prompt), kind).numpy() for prompt in prompts]
    with LLM(str(path), **options) as llm:
        for _ in range(2):  # the second time from captured steps
            outputs = llm.embed(as_dicts(prompts), use_tqdm=False)
            np.testing.assert_allclose([output.outputs.embedding for output in outputs], np.array(expected), atol=1e-4)
    assert (beside_the_host.last_runtime.counts["replayed"] > 0) is ("enforce_eager" not in settings)


def test_an_encoders_tokens_and_segments_are_the_same(beside_the_host, tiny, prompts):
    path = tiny("BertForTokenClassification", num_labels=5)
    oracle = load_pooling_oracle(path, "BertForTokenClassification")
    params = [
        PoolingParams(token_type_ids=[1] * len(prompt) if index % 2 else None) for index, prompt in enumerate(prompts)
    ]
    with LLM(str(path), **(SETTINGS | {"async_scheduling": True, "max_num_batched_tokens": 128})) as llm:
        for _ in range(2):
            outputs = llm.encode(as_dicts(prompts), params, use_tqdm=False)
            for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                types = {"token_type_ids": torch.tensor([[index % 2] * len(prompt)])}
                expected = logits(oracle, prompt, **types).softmax(-1)
                np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=1e-4)


def test_an_encoder_over_the_kernels_of_a_gpu(monkeypatch, tiny):
    """In Triton's interpreter: attention in both directions, within windows and over all."""
    platform = AsyncCpuPlatform("cuda")
    monkeypatch.setattr(selector, "current_platform", lambda _name: platform)
    path = tiny("ModernBertModel", local_attention=8, num_hidden_layers=2)
    oracle = load_pooling_oracle(path, "ModernBertModel")
    prompts = [[5], list(range(10, 31)), [7, 8, 9]]
    options = {"max_model_len": 32, "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 20}
    params = PoolingParams(task="token_embed", use_activation=False)
    with LLM(str(path), async_scheduling=True, enforce_eager=True, skip_tokenizer_init=True, **options) as llm:
        outputs = llm.encode(as_dicts(prompts), params, use_tqdm=False)
        assert llm.llm_engine.explain()["attention_backend"]["chosen"] == "triton"
    for prompt, output in zip(prompts, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, hidden_states(oracle, prompt).numpy(), atol=1e-4)
