"""Encoders against Transformers in float32: hidden states, classifiers, pairs of texts; alone and in mixed batches."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.tiny_poolers import hidden_states, load_pooling_oracle, logits, pooled

from quire import LLM, PoolingParams

from .conftest import SETTINGS, as_dicts

ENCODERS = {
    "Bert": {"num_attention_heads": 4, "layer_norm_eps": 1e-5},
    "Roberta": {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 130},
    "XLMRoberta": {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 140},
    "Camembert": {"pad_token_id": 1, "max_position_embeddings": 140},
    "DistilBert": {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4},
    "ModernBert": {"local_attention": 16, "num_hidden_layers": 4, "classifier_pooling": "mean"},
    "NomicBert": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "Gte": {"type_vocab_size": 1},
}
WHOLE = SETTINGS | {"max_num_batched_tokens": 160}
STEPS = {"roomy": {}, "few rows": {"max_num_seqs": 2, "max_num_batched_tokens": 128}, "eager": {"enforce_eager": True}}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_are_transformers(family, steps, tiny, prompts):
    architecture = f"{family}Model"
    path = tiny(architecture, **ENCODERS[family])
    oracle = load_pooling_oracle(path, architecture)
    params = PoolingParams(task="token_embed", use_activation=False)
    with LLM(str(path), **(WHOLE | STEPS[steps])) as llm:
        for batch in (prompts, prompts[::-1]):
            for prompt, output in zip(batch, llm.encode(as_dicts(batch), params, use_tqdm=False), strict=True):
                np.testing.assert_allclose(output.outputs.data, hidden_states(oracle, prompt).numpy(), atol=1e-4)


def test_the_first_checkpoints_call_weight_and_bias_of_norms_otherwise(tiny, tmp_path):
    path = tiny("BertModel", **ENCODERS["Bert"])
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    shutil.copy(path / "config.json", tmp_path)
    vectors = []
    for folder in (path, tmp_path):
        with LLM(str(folder), **WHOLE) as llm:
            vectors.append(llm.embed({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)[0].outputs.embedding)
    assert vectors[0] == vectors[1]


def rewrite_config(path, folder, drop=(), **values):
    """The checkpoint with another config.json."""
    config = json.loads((path / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in drop}
    (folder / "config.json").write_text(json.dumps(kept | values))
    shutil.copy(path / "model.safetensors", folder)
    return folder


def assert_same_states(folder, oracle, prompts):
    params = PoolingParams(task="token_embed", use_activation=False)
    with LLM(str(folder), **WHOLE) as llm:
        outputs = llm.encode(as_dicts(prompts), params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, hidden_states(oracle, prompt).numpy(), atol=1e-4)


def test_gtes_own_config_with_a_stretched_rotation(tiny, tmp_path, prompts):
    """Alibaba's `ntk`: the base grows by the factor, and all pairs turn more slowly by its 2 / head_dim-th power."""
    path = tiny("GteModel", **ENCODERS["Gte"])
    oracle = load_pooling_oracle(path, "GteModel")
    base, factor, size = 500.0, 2.0, 16
    frequencies = (base * factor) ** -(torch.arange(0, size, 2) / size) / factor ** (2 / size)
    oracle.rotary_emb.inv_freq.copy_(frequencies)
    scaling = {"type": "ntk", "factor": factor}
    values = {"architectures": ["NewModel"], "rope_theta": base, "rope_scaling": scaling}
    assert_same_states(rewrite_config(path, tmp_path, ("rope_parameters",), **values), oracle, prompts)


def test_nomics_own_config(tiny, tmp_path, prompts):
    path = tiny("NomicBertModel", **ENCODERS["NomicBert"])
    config = json.loads((path / "config.json").read_text())
    names = {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    }  # fmt: skip
    values = {old: config[new] for old, new in names.items()} | {"rotary_emb_base": 500.0}
    folder = rewrite_config(path, tmp_path, (*names.values(), "rope_parameters"), **values)
    assert_same_states(folder, load_pooling_oracle(path, "NomicBertModel"), prompts)


@pytest.mark.parametrize("window", [8, 9])
def test_gemma_without_a_causal_mask_embeds(window, tiny, prompts):
    """EmbeddingGemma: every token sees the others, in most layers only those near it."""
    overrides = {"use_bidirectional_attention": True, "sliding_window": window}
    path = tiny(
        "Gemma3TextModel", layer_types=["sliding_attention", "full_attention", "sliding_attention"], **overrides
    )
    oracle = load_pooling_oracle(path, "Gemma3TextModel")
    params = PoolingParams(task="token_embed", use_activation=False)
    with LLM(str(path), **WHOLE) as llm:
        outputs = llm.encode(as_dicts(prompts), params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, hidden_states(oracle, prompt).numpy(), atol=2e-4)


@pytest.mark.parametrize("kind", ["cls", "mean", "max"])
def test_an_encoder_pools_as_it_is_told(kind, tiny, prompts):
    path = tiny("BertModel", **ENCODERS["Bert"])
    oracle = load_pooling_oracle(path, "BertModel")
    with LLM(str(path), pooler_config={"seq_pooling_type": kind.upper()}, **WHOLE) as llm:
        outputs = llm.embed(as_dicts(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        vector = torch.nn.functional.normalize(pooled(hidden_states(oracle, prompt), kind), dim=0)
        np.testing.assert_allclose(output.outputs.embedding, vector.numpy(), atol=1e-4)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "Camembert"])
def test_an_encoder_that_is_a_decoder_sees_only_what_came_before(family, tiny, prompts):
    architecture = f"{family}Model"
    path = tiny(architecture, is_decoder=True, **ENCODERS[family])
    oracle, params = load_pooling_oracle(path, architecture), PoolingParams(task="token_embed", use_activation=False)
    with LLM(str(path), **(WHOLE | {"max_num_batched_tokens": 32})) as llm:
        outputs = llm.encode(as_dicts(prompts), params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, hidden_states(oracle, prompt).numpy(), atol=1e-4)


@pytest.mark.parametrize("local_attention", [0, 1, 3])
def test_a_window_of_no_neighbours_is_the_token_itself(local_attention, tiny, prompts):
    path = tiny("ModernBertModel", **(ENCODERS["ModernBert"] | {"local_attention": local_attention}))
    assert_same_states(path, load_pooling_oracle(path, "ModernBertModel"), prompts)


@pytest.mark.parametrize("activation", ["gelu_new", "quick_gelu", "mish"])
def test_a_classifiers_activation_may_be_any_that_layers_have(activation, tiny, prompts):
    architecture = "ModernBertForSequenceClassification"
    path = tiny(architecture, num_labels=3, **(ENCODERS["ModernBert"] | {"classifier_activation": activation}))
    oracle = load_pooling_oracle(path, architecture)
    expected = torch.stack([logits(oracle, prompt) for prompt in prompts]).softmax(-1)
    with LLM(str(path), **WHOLE) as llm:
        outputs = llm.classify(as_dicts(prompts), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.probs for output in outputs], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", ENCODERS)
def test_classifiers_are_transformers(family, labels, tiny, prompts):
    architecture = f"{family}ForSequenceClassification"
    path = tiny(architecture, num_labels=labels, **ENCODERS[family])
    oracle = load_pooling_oracle(path, architecture)
    expected = torch.stack([logits(oracle, prompt) for prompt in prompts])
    wanted = expected.sigmoid() if labels == 1 else expected.softmax(-1)
    with LLM(str(path), **WHOLE) as llm:
        outputs = llm.classify(as_dicts(prompts), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.probs for output in outputs], wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "XLMRoberta", "ModernBert", "NomicBert", "Gte"])
def test_token_classifiers_are_transformers(family, tiny, prompts):
    architecture = f"{family}ForTokenClassification"
    path = tiny(architecture, num_labels=5, **ENCODERS[family])
    oracle = load_pooling_oracle(path, architecture)
    with LLM(str(path), **WHOLE) as llm:
        outputs = llm.encode(as_dicts(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, logits(oracle, prompt).softmax(-1).numpy(), atol=1e-4)


@pytest.mark.parametrize("family", ["Bert", "NomicBert"])
def test_segments_of_pairs_reach_the_model_also_beside_prompts_without(family, tiny, prompts):
    architecture = f"{family}ForSequenceClassification"
    path = tiny(architecture, num_labels=1, **ENCODERS[family])
    oracle = load_pooling_oracle(path, architecture)
    types = [[int(place > len(prompt) // 2) for place in range(len(prompt))] for prompt in prompts]
    params = [PoolingParams(token_type_ids=row if index % 2 else None) for index, row in enumerate(types)]
    expected = [
        logits(oracle, prompt, **({"token_type_ids": torch.tensor([types[index]])} if index % 2 else {})).sigmoid()
        for index, prompt in enumerate(prompts)
    ]
    with LLM(str(path), **WHOLE) as llm:
        outputs = llm.classify(as_dicts(prompts), pooling_params=params, use_tqdm=False)
        again = llm.classify(as_dicts(prompts), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.probs for output in outputs], torch.stack(expected).numpy(), atol=1e-4)
    plain = torch.stack([logits(oracle, prompt).sigmoid() for prompt in prompts])
    np.testing.assert_allclose([output.outputs.probs for output in again], plain.numpy(), atol=1e-4)
