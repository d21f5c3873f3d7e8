"""Decoders as embedders, classifiers and token classifiers, against Transformers in float32."""

import numpy as np
import pytest
import torch
from tests.oracles.tiny_mixtures import RECURRENT
from tests.oracles.tiny_models import make_tiny_model, tiny_values
from tests.oracles.tiny_poolers import hidden_states, load_pooling_oracle, logits, pooled

from quire import LLM, PoolingParams

from .conftest import SETTINGS, as_dicts

VARIANTS = {
    "roomy": {},
    "chunked prefill": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "few pages, so that requests are preempted": {
        "num_gpu_blocks_override": 10, "max_num_batched_tokens": 48, "long_prefill_token_threshold": 6,
    },
    "no prefix cache, eager": {"enable_prefix_caching": False, "enforce_eager": True, "max_num_seqs": 3},
}  # fmt: skip


def embeddings(llm, prompts, **options):
    outputs = llm.embed(as_dicts(prompts), use_tqdm=False, **options)
    assert [output.prompt_token_ids for output in outputs] == prompts and all(output.finished for output in outputs)
    return np.array([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["last", "cls", "mean", "weighted_mean", "mean_sqrt", "max"])
def test_every_kind_of_pooling_is_its_definition_over_transformers_hidden_states(kind, variant, tiny, prompts):
    path = tiny("LlamaForCausalLM")
    oracle = load_pooling_oracle(path, "LlamaForCausalLM")
    config = {"seq_pooling_type": kind.upper(), "use_activation": False}
    with LLM(str(path), runner="pooling", pooler_config=config, **(SETTINGS | VARIANTS[variant])) as llm:
        for order in (1, -1):
            batch = prompts[::order]
            expected = [pooled(hidden_states(oracle, prompt), kind).numpy() for prompt in batch]
            np.testing.assert_allclose(embeddings(llm, batch), np.array(expected), atol=1e-4, rtol=1e-4)
        stats = llm.llm_engine._client.core.stats()
        assert (stats.num_preemptions > 0) is variant.startswith("few pages")


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaModel", {}),
        ("MistralForCausalLM", {"sliding_window": 12}),
        ("Qwen2Model", {}),
        ("Qwen3ForCausalLM", {}),
        ("Qwen3Model", {"tie_word_embeddings": True}),
        ("GPT2LMHeadModel", {}),
        ("Gemma2Model", {}),
        ("Phi3ForCausalLM", {}),
        ("DeepseekV3ForCausalLM", {}),
        ("BloomForCausalLM", {}),
        ("MambaForCausalLM", RECURRENT["MambaForCausalLM"]),
        ("FalconMambaModel", RECURRENT["FalconMambaForCausalLM"]),
        ("JambaForCausalLM", RECURRENT["JambaForCausalLM"]),
    ],
)
def test_any_decoder_embeds_with_its_last_token_normalised(architecture, overrides, tiny, prompts):
    path = tiny(architecture, **overrides)
    oracle = load_pooling_oracle(path, architecture)
    expected = torch.stack([hidden_states(oracle, prompt)[-1] for prompt in prompts])
    with LLM(str(path), runner="pooling", **SETTINGS) as llm:
        found = embeddings(llm, prompts)
    np.testing.assert_allclose(found, torch.nn.functional.normalize(expected, dim=-1).numpy(), atol=1e-4)


@pytest.mark.parametrize("architecture", ["Gemma3ForSequenceClassification", "Gemma3Model"])
def test_the_text_part_of_a_model_that_also_sees_pools(architecture, tmp_path, prompts):
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    text = tiny_values("Gemma3ForCausalLM")
    make_tiny_model(architecture, tmp_path, text_config=text, vision_config=vision, num_labels=3, pad_token_id=2,
                    hidden_size=64)  # fmt: skip
    oracle = load_pooling_oracle(tmp_path, architecture)
    is_bare = architecture.endswith("Model")
    params = PoolingParams(task="token_embed" if is_bare else "classify", use_activation=False)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        outputs = llm.encode(as_dicts(prompts), params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = hidden_states(oracle, prompt) if is_bare else logits(oracle, prompt)
        np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=1e-4)


def test_what_runs_with_transformers_own_modules_embeds_too(tiny, prompts):
    path = tiny("LlamaForCausalLM")
    oracle = load_pooling_oracle(path, "LlamaForCausalLM")
    expected = torch.stack([hidden_states(oracle, prompt).mean(0) for prompt in prompts])
    config = {"seq_pooling_type": "MEAN"}
    with LLM(str(path), runner="pooling", model_impl="transformers", pooler_config=config, **SETTINGS) as llm:
        found = embeddings(llm, prompts)
    np.testing.assert_allclose(found, torch.nn.functional.normalize(expected, dim=-1).numpy(), atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2"])
def test_a_sequence_classifiers_probabilities_are_transformers(family, labels, variant, tiny, prompts):
    architecture = f"{family}ForSequenceClassification"
    path = tiny(architecture, num_labels=labels)
    oracle = load_pooling_oracle(path, architecture)
    expected = torch.stack([logits(oracle, prompt) for prompt in prompts])
    wanted = expected.sigmoid() if labels == 1 else expected.softmax(-1)
    with LLM(str(path), **(SETTINGS | VARIANTS[variant])) as llm:
        outputs = llm.classify(as_dicts(prompts), use_tqdm=False)
        raw = llm.encode(as_dicts(prompts), PoolingParams(use_activation=False), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.probs for output in outputs], wanted.numpy(), atol=1e-4)
    np.testing.assert_allclose(np.array([output.outputs.data for output in raw]), expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_classifier_gives_every_token_its_own(variant, tiny, prompts):
    path = tiny("Qwen3ForTokenClassification", num_labels=4)
    oracle = load_pooling_oracle(path, "Qwen3ForTokenClassification")
    with LLM(str(path), **(SETTINGS | VARIANTS[variant])) as llm:
        outputs = llm.encode(as_dicts(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, logits(oracle, prompt).softmax(-1).numpy(), atol=1e-4)


def test_one_batch_may_hold_vectors_and_tokens(tiny, prompts):
    path = tiny("LlamaForCausalLM")
    oracle = load_pooling_oracle(path, "LlamaForCausalLM")
    params = [
        PoolingParams(task="token_embed" if index % 2 else "embed", use_activation=index % 3 > 0)
        for index in range(len(prompts))
    ]
    with LLM(str(path), runner="pooling", **(SETTINGS | {"max_num_batched_tokens": 16})) as llm:
        outputs = llm.encode(as_dicts(prompts), params, use_tqdm=False)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        states = hidden_states(oracle, prompt)
        expected = states if index % 2 else states[-1]
        if index % 3:
            expected = torch.nn.functional.normalize(expected, dim=-1)
        np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=1e-4)
