"""Latent attention against Transformers in float32: with and without the queries' latent, stretched rotations, odd numbers of
heads, prefixes, page sizes and two ranks."""

from typing import Any

import pytest
import torch
from tests.distributed.test_models_over_ranks import check
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, prompts, run_mixed
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny

from quire.kernels import ops
from quire.kernels.cpu import recording
from quire.platforms.cpu import CpuPlatform

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256, "factor": 1.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 1.5, 2.0, 4.0],
}  # fmt: skip

LATENTS = {
    "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
ODD = {
    "num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 60, "qk_nope_head_dim": 7, "v_head_dim": 9,
    "kv_lora_rank": 19, "q_lora_rank": 11, "attention_bias": True, "first_k_dense_replace": 3,
}  # fmt: skip

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2ForCausalLM", {}),
    "v2 lite: no latent of queries, any expert": (
        "DeepseekV2ForCausalLM",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ),
    "v3: 5 heads of odd sizes, biases, all layers dense": ("DeepseekV3ForCausalLM", ODD),
    "v2: stretched": ("DeepseekV2ForCausalLM", {"rope_parameters": YARN}),
    "v3": ("DeepseekV3ForCausalLM", {}),
    "v3: stretched, no groups": (
        "DeepseekV3ForCausalLM",
        {"rope_parameters": YARN, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ),
    "v3: halves rotate, wide values, tied": (
        "DeepseekV3ForCausalLM",
        {"rope_interleave": False, "v_head_dim": 40, "tie_word_embeddings": True},
    ),
    "glm4 moe lite: dense layers where its config says": (
        "Glm4MoeLiteForCausalLM",
        LATENTS
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_routed_experts": 8, "moe_intermediate_size": 24},
    ),
    "mistral4: queries grow, no latent of queries": (
        "Mistral4ForCausalLM",
        LATENTS
        | {
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "partial_rotary_factor": 8 / 24},
        },
    ),
    "youtu: tied": ("YoutuForCausalLM", LATENTS | {"tie_word_embeddings": True, "pad_token_id": None}),
    "minicpm3": ("MiniCPM3ForCausalLM", {}),
    "minicpm3: stretched, tied": ("MiniCPM3ForCausalLM", {"rope_parameters": LONG, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    for token_ids, logprobs in run_mixed(ModelDriver(build_tiny(path)), seed=len(name)):
        expected = oracle_logprobs(path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_any_page_size_gives_the_same(block_size, kernels, tiny):
    path = tiny("DeepseekV3ForCausalLM")
    (*_, token_ids) = prompts()
    driver = ModelDriver(build_tiny(path, block_size=block_size), max_rows=2, pages_a_row=96)
    logprobs = driver.prefill(Sequence(token_ids, row=1), chunk=16)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


def test_a_prefix_that_another_request_computed_may_be_shared(kernels, tiny):
    path = tiny("DeepseekV2ForCausalLM")
    driver = ModelDriver(build_tiny(path))
    *_, first, second = prompts()
    second = first[:32] + second[:20]
    driver.prefill(Sequence(first, row=0))
    for group in driver.step_inputs.attention:
        group.block_table[1, :2] = group.block_table[0, :2]
    logprobs = driver.prefill(Sequence(second, row=1, computed=32))
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(second))[32:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(dtype, kernels, tiny):
    path = tiny("MiniCPM3ForCausalLM", dtype=dtype)
    (*_, token_ids) = prompts()
    logprobs = ModelDriver(build_tiny(path, dtype=dtype)).prefill(Sequence(token_ids, row=0), chunk=16)
    error = (logprobs - oracle_logprobs(path, tuple(token_ids))).abs()
    worst, mean = (0.5, 0.05) if dtype == "bfloat16" else (0.07, 0.006)
    assert error.max() < worst
    assert error.mean() < mean


def test_a_token_keeps_one_latent_and_one_rotated_part(reference_kernels, tiny):
    specs = build_tiny(tiny("DeepseekV3ForCausalLM")).kv_cache_specs()
    assert {(spec.kind, spec.bytes_per_token, spec.num_kv_heads) for spec in specs} == {("mla", (32 + 8) * 4, 1)}


@pytest.mark.parametrize("layers", ["native", "fused"])
def test_two_ranks_that_share_the_heads_compute_what_one_computes(layers, tmp_path, restored_choice):
    names = ("v2 lite: no latent of queries, any expert", "v3", "minicpm3: stretched, tied")
    models = {name: SHAPES[name] for name in names} | {
        "v3: biases": ("DeepseekV3ForCausalLM", {"attention_bias": True})
    }
    check(2, tmp_path, models, layers)


def test_a_step_of_latent_attention_is_recorded_once_and_replayed_for_any_batch(tiny, restored_choice):
    CpuPlatform().select_kernels()
    if ops.choices()["head_linear"].chosen.platform != "cpu":
        pytest.skip("the native kernels are not built here")
    path = tiny("MiniCPM3ForCausalLM")
    driver = ModelDriver(build_tiny(path))
    (*_, token_ids) = prompts()
    driver.prefill(Sequence(token_ids[:20], row=1))
    step = driver.step_inputs
    step.num_tokens = 20
    recorded = recording.record(lambda: driver.model.forward(step), 20, 1, runs=False)
    assert recorded is not None
    driver.model.forward = lambda step: recorded.replay(step.num_tokens, 0)
    logprobs = driver.prefill(Sequence(token_ids, row=2), chunk=13)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)
