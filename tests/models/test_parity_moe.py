"""Every mixture of experts against Transformers in float32: the same greedy tokens, and logprobs within 1e-3."""

from typing import Any

import pytest
import torch
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, run_mixed
from tests.oracles.model_driver import ModelDriver, build_tiny

DEEPSEEK = {
    "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2, "n_group": 3,
    "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "first_k_dense_replace": 1,
}  # fmt: skip
GRANITE = {
    "num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
ERNIE = {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2}
LLAMA4 = {
    "num_hidden_layers": 4, "num_local_experts": 5, "head_dim": 16, "intermediate_size": 40, "intermediate_size_mlp": 72,
    "interleave_moe_layer_step": 2, "attention_chunk_size": 12, "floor_scale": 8, "attn_scale": 0.5,
    "moe_layers": None, "no_rope_layers": None,
}  # fmt: skip
LATENT = DEEPSEEK | {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": ("PhimoeForCausalLM", {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True}),
    "phimoe: an expert that is chosen alone, window": (
        "PhimoeForCausalLM",
        {"num_local_experts": 9, "router_jitter_noise": 0.2, "sliding_window": 9},
    ),
    "granite moe": ("GraniteMoeForCausalLM", GRANITE),
    "granite moe: biases, all experts, tied": (
        "GraniteMoeForCausalLM",
        GRANITE | {"attention_bias": True, "num_experts_per_tok": 6, "tie_word_embeddings": True},
    ),
    "granite moe shared": ("GraniteMoeSharedForCausalLM", GRANITE | {"shared_intermediate_size": 56}),
    "granite moe shared: nothing shared": ("GraniteMoeSharedForCausalLM", GRANITE),
    "glm4 moe": ("Glm4MoeForCausalLM", DEEPSEEK | {"head_dim": 16, "use_qk_norm": True}),
    "glm4 moe: biases, one group, one expert": (
        "Glm4MoeForCausalLM",
        DEEPSEEK | {"attention_bias": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
    ),
    "dots1": ("Dots1ForCausalLM", DEEPSEEK | {"sliding_window": None}),
    "dots1: windows, weights as they are": (
        "Dots1ForCausalLM",
        DEEPSEEK | {"sliding_window": 9, "max_window_layers": 1, "norm_topk_prob": False, "first_k_dense_replace": 2},
    ),
    "ernie4.5 moe": ("Ernie4_5_MoeForCausalLM", ERNIE),
    "ernie4.5 moe: biases, nothing shared, one layer of experts": (
        "Ernie4_5_MoeForCausalLM",
        ERNIE | {"use_bias": True, "moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_end_index": 1},
    ),
    "gpt-oss": ("GptOssForCausalLM", GPT_OSS),
    "gpt-oss: no biases of attention, all layers with windows, narrow limit": (
        "GptOssForCausalLM",
        GPT_OSS | {"attention_bias": False, "layer_types": ["sliding_attention"] * 3, "swiglu_limit": 0.5},
    ),
    "llama4": ("Llama4ForCausalLM", LLAMA4),
    "llama4: experts everywhere, two a token, no norms": (
        "Llama4ForCausalLM",
        LLAMA4
        | {"interleave_moe_layer_step": 1, "num_experts_per_tok": 2, "use_qk_norm": False, "attention_bias": True}
        | {"attn_temperature_tuning": False, "no_rope_layer_interval": 2},
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe: clipped, renormalised, all experts": (
        "OlmoeForCausalLM",
        {"num_experts": 3, "num_experts_per_tok": 3, "clip_qkv": 0.7, "norm_topk_prob": True, "num_key_value_heads": 4},
    ),
    "hunyuan moe": ("HunYuanMoEV1ForCausalLM", {"num_experts": 6, "moe_topk": 2, "head_dim": 16}),
    "hunyuan moe: a number of experts a layer, stretched": (
        "HunYuanMoEV1ForCausalLM",
        {
            "num_experts": 5,
            "moe_topk": [1, 5, 2],
            "head_dim": 24,
            "rope_scaling": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    "minimax m2": ("MiniMaxM2ForCausalLM", {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 16}),
    "minimax m2: half of each head rotated": (
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 24, "rotary_dim": 12},
    ),
    "deepseek v2: groups": (
        "DeepseekV2ForCausalLM",
        LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek v2: lite": ("DeepseekV2ForCausalLM", LATENT | {"topk_method": "greedy", "q_lora_rank": None}),
    "deepseek v3": ("DeepseekV3ForCausalLM", LATENT),
    "deepseek v3: all dense but one layer, one group": (
        "DeepseekV3ForCausalLM",
        LATENT | {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    for token_ids, logprobs in run_mixed(ModelDriver(build_tiny(path)), seed=len(name)):
        expected = oracle_logprobs(path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()
