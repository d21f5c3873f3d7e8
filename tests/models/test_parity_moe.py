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
