"""Every mixture of experts against Transformers in float32: the same greedy tokens, and logprobs within 1e-3."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
KINDS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_shared_experts": 2}
LATENT = DEEPSEEK | {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
COHERE = {
    "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2,
    "prefix_dense_intermediate_size": 72, "logit_scale": 0.6,
}  # fmt: skip
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9}

NEMOTRON = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"], "num_hidden_layers": 5, "head_dim": 16,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 3, "topk_group": 2,
    "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5, "moe_latent_size": None,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": ("PhimoeForCausalLM", {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True}),
    "phimoe: an expert that is chosen alone, window, tied": (
        "PhimoeForCausalLM",
        {"num_local_experts": 9, "router_jitter_noise": 0.2, "sliding_window": 9}
        | {"tie_word_embeddings": True, "lm_head_bias": True},
    ),
    "phimoe: stretched": (
        "PhimoeForCausalLM",
        {
            "num_local_experts": 5,
            "rope_scaling": {
                "rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.3, "long_mscale": 1.6,
                "short_factor": [1.0 + 0.3 * i for i in range(8)], "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "granite moe": ("GraniteMoeForCausalLM", GRANITE),
    "granite moe: biases, all experts, tied": (
        "GraniteMoeForCausalLM",
        GRANITE | {"attention_bias": True, "num_experts_per_tok": 6, "tie_word_embeddings": True},
    ),
    "granite moe shared": ("GraniteMoeSharedForCausalLM", GRANITE | {"shared_intermediate_size": 56}),
    "granite moe shared: nothing shared": ("GraniteMoeSharedForCausalLM", GRANITE),
    "granite moe swa": (
        "GraniteMoeSWAForCausalLM",
        GRANITE | {"shared_intermediate_size": 56, "sliding_window": 9, "layer_rope_theta": [0, 10000.0, 500.0]},
    ),
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
        ERNIE
        | {"use_bias": True, "tie_word_embeddings": True, "moe_num_shared_experts": 0}
        | {"moe_layer_interval": 2, "moe_layer_end_index": 1},
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
    "llama4: stretched, which the norms after rotation take back": (
        "Llama4ForCausalLM", LLAMA4 | {"rope_parameters": YARN, "rms_norm_eps": 1e-2},
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
    "hunyuan moe: stretched by yarn, a large epsilon": (
        "HunYuanMoEV1ForCausalLM",
        {"num_experts": 3, "moe_topk": 1, "head_dim": 8, "rms_norm_eps": 1e-2, "rope_parameters": YARN},
    ),
    "minimax m2": ("MiniMaxM2ForCausalLM", {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 16}),
    "minimax m2: half of each head rotated": (
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 24, "rotary_dim": 12},
    ),
    "flex olmo": ("FlexOlmoForCausalLM", {"num_experts": 5, "num_experts_per_tok": 2}),
    "hunyuan 3": (
        "HYV3ForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "num_shared_experts": 2, "moe_intermediate_size": 40},
    ),
    "mellum": (
        "MellumForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "solar open": ("SolarOpenForCausalLM", DEEPSEEK | {"head_dim": 16}),
    "exaone moe": ("ExaoneMoeForCausalLM", KINDS | {"sliding_window": 9, "sliding_window_pattern": 3}),
    "exaone moe: no positions, weights as they are": (
        "ExaoneMoeForCausalLM",
        KINDS | {"sliding_window": 9, "layer_types": ["full_attention"] * 3, "norm_topk_prob": False},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        KINDS | {"head_dim": 16, "sliding_window": 9, "global_attn_every_n_layers": 3, "route_scale": 1.5, "mup_enabled": True},
    ),
    "afmoe: biases but the gate's": ("AfmoeForCausalLM", KINDS | {"head_dim": 16, "attention_bias": True}),
    "cohere2 moe": (
        "Cohere2MoeForCausalLM",
        COHERE | {"num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "cohere2 moe: sigmoid scores, shared experts added, RMS norms, other dense layers": (
        "Cohere2MoeForCausalLM",
        COHERE
        | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid"}
        | {"rms_norm_eps": 1e-5, "prefix_dense_sliding_window_pattern": 2, "first_k_dense_replace": 2},
    ),
    "cohere2 moe: another base of the rotation": (
        "Cohere2MoeForCausalLM", COHERE | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "nemotron-h: experts on latents, biases": ("NemotronHForCausalLM", NEMOTRON | {"moe_latent_size": 20, "mlp_bias": True}),
    "nemotron-h: experts without gates": (
        "NemotronHForCausalLM",
        NEMOTRON,
    ),
    "deepseek v2: groups": (
        "DeepseekV2ForCausalLM",
        LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek v2: biases of feed-forwards": ("DeepseekV2ForCausalLM", LATENT | {"topk_method": "greedy", "mlp_bias": True}),
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
    assert_parity(path, path)


def assert_parity(path: Path, oracle_path: Path) -> None:
    for token_ids, logprobs in run_mixed(ModelDriver(build_tiny(path)), seed=1):
        expected = oracle_logprobs(oracle_path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


def write_as(path: Path, folder: Path, config: dict[str, Any], rename: Callable[[str], str]) -> Path:
    """A checkpoint's weights under other names, q, k and v put together, with another config beside them."""
    weights = {rename(name): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    for name in [name for name in weights if ".q_proj." in name]:
        parts = [weights.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        weights[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BAILING_NAMES = {
    "embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn": "attention",
    "q_norm": "query_layernorm", "k_norm": "key_layernorm", "e_score_correction_bias": "expert_bias",
}  # fmt: skip


def bailing_name(name: str) -> str:
    for old, new in BAILING_NAMES.items():
        name = name.replace(old, new)
    return name


def test_ling_2_is_glm_under_other_names(kernels, tiny, tmp_path):
    """Transformers has no class for Ling; GLM-4.5 computes the same."""
    path = tiny("Glm4MoeForCausalLM", **DEEPSEEK, head_dim=16, use_qk_norm=True)
    config = json.loads((path / "config.json").read_text())
    own = {"architectures": ["BailingMoeV2ForCausalLM"], "score_function": "sigmoid", "use_qk_norm": True}
    own |= {"num_experts": config.pop("n_routed_experts"), "num_shared_experts": config.pop("n_shared_experts")}
    own |= {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_parameters": None}
    assert_parity(write_as(path, tmp_path, config | own, bailing_name), path)


def test_ling_is_granite_without_multipliers_under_other_names(kernels, tiny, tmp_path):
    """Transformers has no class for Ling; Granite with shared experts computes the same, with experts in one tensor."""
    path = tiny(
        "GraniteMoeSharedForCausalLM", num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=80,
        intermediate_size=40, attention_multiplier=16**-0.5, embedding_multiplier=1.0, residual_multiplier=1.0,
        logits_scaling=1.0,
    )  # fmt: skip
    config = json.loads((path / "config.json").read_text())
    own = {
        "architectures": ["BailingMoeForCausalLM"],
        "num_experts": 6,
        "num_shared_experts": 2,
        "norm_topk_prob": True,
    }
    own |= {"moe_intermediate_size": 40, "head_dim": 16}
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"):
        config.pop(name)
    folder = write_as(path, tmp_path, config | own, bailing_name)
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        prefix, _, rest = name.partition("block_sparse_moe.")
        if rest == "router.layer.weight":
            weights[prefix + "mlp.gate.weight"] = weights.pop(name)
        elif rest:
            both = weights.pop(name)
            for expert, matrix in enumerate(both):
                parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
                parts = parts if rest == "input_linear.weight" else [("down_proj", matrix)]
                weights |= {f"{prefix}mlp.experts.{expert}.{part}.weight": value.clone() for part, value in parts}
        elif "shared_mlp.input_linear" in name:
            for part, value in zip(("gate_proj", "up_proj"), weights.pop(name).chunk(2), strict=True):
                new = name.replace("shared_mlp.input_linear", f"mlp.shared_experts.{part}")
                weights[new] = value.clone()
        elif "shared_mlp.output_linear" in name:
            weights[name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")] = weights.pop(name)
    save_file(weights, folder / "model.safetensors")
    assert_parity(folder, path)


def test_the_text_part_of_llama_4_is_read_from_a_checkpoint_that_sees(kernels, tiny, tmp_path):
    path = tiny("Llama4ForCausalLM", **LLAMA4)
    text = json.loads((path / "config.json").read_text())
    weights = {f"language_model.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(weights | {"vision_model.layernorm_pre.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert_parity(tmp_path, path)
