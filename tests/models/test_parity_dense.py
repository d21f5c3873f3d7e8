"""Dense decoders of every family against Transformers in float32: the same greedy tokens, and logprobs within 1e-3."""

import dataclasses
from typing import Any

import pytest
import torch
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, prompts, run_mixed
from tests.oracles.converted_models import make_converted_model
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import load_oracle

from quire.kernels.cpu import recording
from quire.models import registry
from quire.models.registry import ModelRegistry

ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20, "hidden_size": 72, "intermediate_size": 100}
ODD_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 120, "intermediate_size": 100}
ONE_KV_HEAD = {"num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}
SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, **NO_DROPOUT}
MPT = {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}
OLD_FALCON = {"new_decoder_architecture": False, "num_kv_heads": None}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral": ("MinistralForCausalLM", SLIDING | {"head_dim": 16}),
    "ministral: all layers with windows": ("MinistralForCausalLM", {"sliding_window": 9, "head_dim": 24, "layer_types": None}),
    "ministral3": (
        "Ministral3ForCausalLM",
        {"sliding_window": None, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "max_position_embeddings": 16}},
    ),
    "cwm": ("CwmForCausalLM", {"sliding_window": 9}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "smollm3: windows, tied": (
        "SmolLM3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1], **TIED},
    ),
    "helium": ("HeliumForCausalLM", {"head_dim": 16}),
    "ernie 4.5": ("Ernie4_5ForCausalLM", {"head_dim": 16}),
    "ernie 4.5: biases, odd": ("Ernie4_5ForCausalLM", ODD | {"use_bias": True}),
    "seed-oss": ("SeedOssForCausalLM", {"head_dim": 24, "residual_dropout": 0.0, "attention_dropout": 0.0}),
    "seed-oss: no biases but the output's": (
        "SeedOssForCausalLM",
        ODD | {"attention_bias": False, "attention_out_bias": True, "residual_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "arcee": ("ArceeForCausalLM", {}),
    "arcee: biases, odd": ("ArceeForCausalLM", ODD | {"attention_bias": True, "mlp_bias": True}),
    "apertus": ("ApertusForCausalLM", {}),
    "apertus: one KV head, biases": ("ApertusForCausalLM", ONE_KV_HEAD | {"attention_bias": True}),
    "hunyuan dense": ("HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "hunyuan dense: odd, stretched": (
        "HunYuanDenseV1ForCausalLM",
        ODD | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "olmo": ("OlmoForCausalLM", {}),
    "olmo: clipped": ("OlmoForCausalLM", {"clip_qkv": 0.7, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo2: odd": ("Olmo2ForCausalLM", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 120}),
    "olmo3": ("Olmo3ForCausalLM", SLIDING),
    "olmo3: stretched": (
        "Olmo3ForCausalLM",
        SLIDING | {
            "rope_parameters": {
                "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
    ),
    "glm": ("GlmForCausalLM", {"head_dim": 16}),
    "glm: no biases, odd, tied": ("GlmForCausalLM", ODD | {"attention_bias": False, **TIED}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16}),
    "glm4: biases, one KV head": ("Glm4ForCausalLM", ONE_KV_HEAD | {"head_dim": 24, "attention_bias": True}),
    "stablelm": ("StableLmForCausalLM", {"use_parallel_residual": False, "qk_layernorm": False}),
    "stablelm: parallel, norms of heads, biases": (
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "nemotron": ("NemotronForCausalLM", {"head_dim": 16}),
    "nemotron: biases, odd": ("NemotronForCausalLM", ODD | {"attention_bias": True, "mlp_bias": True}),
    "jais2": ("Jais2ForCausalLM", {"head_dim": 16}),
    "persimmon": ("PersimmonForCausalLM", {}),
    "persimmon: no norms of heads, odd": ("PersimmonForCausalLM", ODD_HEADS | {"qk_layernorm": False}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "gpt-neox: one half after the other, no biases, odd": (
        "GPTNeoXForCausalLM",
        ODD_HEADS | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5},
    ),
    "gpt-neox: five values of each head rotate": ("GPTNeoXForCausalLM", {"num_attention_heads": 3, "hidden_size": 60}),
    "gpt-j": ("GPTJForCausalLM", GPT | {"rotary_dim": 8}),
    "gpt-j: odd": ("GPTJForCausalLM", GPT | {"n_embd": 72, "n_head": 3, "rotary_dim": 12, "n_inner": 100}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", GPT),
    "gpt-bigcode: a key for each query, untied": (
        "GPTBigCodeForCausalLM",
        GPT | {"multi_query": False, "n_inner": 100, "tie_word_embeddings": False},
    ),
    "bloom": ("BloomForCausalLM", {"n_layer": 3, "n_head": 4, **TIED}),
    "bloom: 6 heads": ("BloomForCausalLM", {"n_layer": 3, "n_head": 6, "hidden_size": 72}),
    "bloom: residuals of what the norms give": (
        "BloomForCausalLM",
        {"n_layer": 3, "apply_residual_connection_post_layernorm": True},
    ),
    "mpt": ("MptForCausalLM", MPT),
    "mpt: 6 heads, clipped": (
        "MptForCausalLM",
        MPT | {"d_model": 72, "n_heads": 6, "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3}},
    ),
    "mpt: settings that Transformers' class does not read": (
        "MptForCausalLM", MPT | {"logit_scale": 0.5, "expansion_ratio": 2, "attn_config": {"alibi_bias_max": 4, "alibi": False}},
    ),
    "falcon: 7b": ("FalconForCausalLM", OLD_FALCON | {"multi_query": True, "parallel_attn": True}),
    "falcon: 40b": ("FalconForCausalLM", {"tie_word_embeddings": False}),
    "falcon: 11b, one norm, biases": ("FalconForCausalLM", {"num_ln_in_parallel_attn": 1, "bias": True}),
    "falcon: rw": (
        "FalconForCausalLM",
        OLD_FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 100},
    ),
    "falcon: 6 heads": (
        "FalconForCausalLM",
        OLD_FALCON | {"multi_query": False, "num_attention_heads": 6, "hidden_size": 72, "tie_word_embeddings": False},
    ),
    "opt: 350m": ("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 40}),
    "opt: no biases, no weights in norms, untied": (
        "OPTForCausalLM",
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
    ),
    "phi: norms of heads, tied": ("PhiForCausalLM", {"qk_layernorm": True, **TIED}),
    "gpt-j: tied": ("GPTJForCausalLM", GPT | {"rotary_dim": 8, **TIED}),
    "gpt-1": ("OpenAIGPTLMHeadModel", {}),
    "gpt-1: another activation, untied": ("OpenAIGPTLMHeadModel", {"afn": "swish", "tie_word_embeddings": False}),
    "gpt-neo": ("GPTNeoForCausalLM", {}),
    "gpt-neo: odd, untied": (
        "GPTNeoForCausalLM",
        {"num_heads": 6, "num_attention_heads": 6, "hidden_size": 72, "intermediate_size": 100, "tie_word_embeddings": False,
         "attention_types": [[["local"], 1], [["global", "local", "local"], 1]]},
    ),
    "gpt-neox japanese": ("GPTNeoXJapaneseForCausalLM", {}),
    "gpt-neox japanese: a part of each head rotates, untied": (
        "GPTNeoXJapaneseForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
         "intermediate_multiple_size": 2, "tie_word_embeddings": False},
    ),
    "codegen": ("CodeGenForCausalLM", {}),
    "codegen: one head a device, tied": ("CodeGenForCausalLM", {"n_head": 4, "rotary_dim": 6, "n_inner": 100, **TIED}),
    "gemma: another activation, untied": (
        "GemmaForCausalLM", ODD | {"hidden_act": "silu", "head_dim": 24, "tie_word_embeddings": False},
    ),
    "gemma3: a cap of scores that only its config has": ("Gemma3ForCausalLM", {"attn_logit_softcapping": 0.5}),
    "cohere: norms of heads, untied": ("CohereForCausalLM", {"use_qk_norm": True, "tie_word_embeddings": False}),
    "vaultgemma": ("VaultGemmaForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8, **TIED}),
    "granite swa": (
        "GraniteSWAForCausalLM",
        {"sliding_window": 9, "layer_rope_theta": [0, 10000.0, 500.0], "attention_multiplier": 0.2, "residual_multiplier": 0.4},
    ),
    "hyperclovax": ("HyperCLOVAXForCausalLM", {"residual_multiplier": 0.6, "logits_scaling": 0.5}),
    "hyperclovax: no norms after halves": ("HyperCLOVAXForCausalLM", {"use_post_norm": False, "attention_multiplier": 0.3}),
}  # fmt: skip


def is_recorded(driver: ModelDriver) -> bool:
    """Whether nothing but native kernels runs in a step, the first one too, so that it can be replayed."""
    inputs = driver.step_inputs
    inputs.num_tokens, inputs.num_logits = 10, 3
    for group in inputs.attention:
        group.num_tokens, group.num_requests, group.max_query_len, group.max_seq_len = 10, 1, 10, 10
    step = recording.record(
        lambda: (driver.model.forward(inputs), driver.model.compute_logits(inputs)), 10, 3, runs=False
    )
    return step is not None


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    driver = ModelDriver(build_tiny(path))
    assert kernels == "reference" or is_recorded(driver)
    for token_ids, logprobs in run_mixed(driver, seed=len(name)):
        expected = oracle_logprobs(path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


CONVERTED: dict[str, dict[str, Any]] = {
    "internlm2": {},
    "internlm": {"attention_bias": True, "num_key_value_heads": 4},
    "internlm3": ODD | {"attention_bias": True, "mlp_bias": True},
    "baichuan: 7b": {"num_key_value_heads": 4},
    "baichuan: 13b": ODD_HEADS,
    "qwen": {"num_key_value_heads": 4},
    "exaone": ODD,
    "telechat2": {"attention_bias": True, "mlp_bias": True},
    "telechat: trained on more than its base length": {
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0 * 3 ** (16 / 14)},
    },
    "pangu embedded": {"attention_bias": True},
    "minicpm": {"attention_multiplier": 0.25},
    "chatglm": {"head_dim": 16},
    "chatglm: saved after training": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    },
    "orion": {"partial_rotary_factor": 1.0, "use_parallel_residual": False, "qk_layernorm": False},
    "mimo": {},
    "teleflm": {"attention_multiplier": 0.25, "residual_multiplier": 1.0},
    "olmo3: before rope_parameters": {
        "sliding_window": 9,
        "num_hidden_layers": 5,
        "layer_types": None,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "fuyu": {},
    "mistral3 that sees": {"sliding_window": 9},
    "falcon: before Transformers had it": {
        "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True,
    },
    "pythia: before rope_parameters": {"rotary_pct": 0.5, "rotary_emb_base": 500, "tie_word_embeddings": False},
    "decilm": {"intermediate_size": 256},
    "gemma3 that sees": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERTED)
def test_architectures_that_transformers_lacks_give_the_logprobs_of_a_model_that_computes_the_same(
    name, kernels, tmp_path
):
    oracle = make_converted_model(name, tmp_path, **CONVERTED[name])
    driver = ModelDriver(build_tiny(tmp_path))
    for token_ids, logprobs in run_mixed(driver, seed=len(name)):
        expected = oracle(torch.tensor([token_ids])).log_softmax(-1)[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize(
    "name", ["bloom", "olmo2", "hunyuan dense", "falcon: 7b", "granite swa", "ministral3", "opt: 350m", "cwm"]
)
def test_a_prefix_that_another_request_computed_may_be_shared(name, kernels, tiny):
    """Two rows whose tables name the same first pages: the second computes only its own rest."""
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    driver = ModelDriver(build_tiny(path))
    *_, first, second = prompts()
    second = first[:32] + second[:20]
    driver.prefill(Sequence(first, row=0))
    for group in driver.step_inputs.attention:
        group.block_table[1, :2] = group.block_table[0, :2]
    logprobs = driver.prefill(Sequence(second, row=1, computed=32), chunk=7)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(second))[32:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_longrope_beyond_the_original_length_gives_transformers_logprobs(architecture, kernels, tiny):
    """Transformers chooses the divisors by each request's length, a model here by the longest context: both are beyond it."""
    parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)],
    }  # fmt: skip
    overrides = {"original_max_position_embeddings": 16} if architecture.startswith("Phi3") else {}
    path = tiny(architecture, rope_parameters=parameters, **overrides)
    (*_, token_ids) = prompts()
    logprobs = ModelDriver(build_tiny(path)).prefill(Sequence(token_ids, row=0), chunk=16)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


def test_a_head_may_be_divided_by_its_rows_lengths_when_it_is_loaded(kernels, tiny, monkeypatch):
    """Baichuan 2."""
    path = tiny("LlamaForCausalLM")
    (*_, token_ids) = prompts()
    oracle = load_oracle(path)
    head = oracle.lm_head.weight.data
    head.copy_(torch.nn.functional.normalize(head))
    make = ModelRegistry.resolve("LlamaForCausalLM").load()
    spec = lambda hf: dataclasses.replace(make(hf), normalized_head=True)  # noqa: E731
    monkeypatch.setattr(registry.MODELS, "_entries", dict(registry.MODELS._entries))
    registry.ModelRegistry.register_model("LlamaForCausalLM", spec, override=True, owner="test")
    logprobs = ModelDriver(build_tiny(path)).prefill(Sequence(token_ids, row=0))
    with torch.no_grad():
        expected = oracle(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
