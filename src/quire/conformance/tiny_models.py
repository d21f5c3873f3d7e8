"""Tiny models of several families, as a config.json each: their weights are random (`load_format="dummy"`), and the same on every
device."""

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "gpt2": (
        "GPT2LMHeadModel",
        "gpt2",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "tie_word_embeddings": True},
    ),
    "bloom": ("BloomForCausalLM", "bloom", {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 32}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 28,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "layer_types": _WINDOWS,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": _WINDOWS,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12, "chunk_size": 16, "layer_norm_epsilon": 1e-5},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "layer_types": _LINEAR,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "bert": (
        "BertModel",
        "bert",
        {"num_key_value_heads": 4, "layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu"},
    ),
}
"""Architecture, `model_type`, and what differs from the sizes that all share."""


def write_model(name: str, folder: Path) -> Path:
    """The folder of a model, written into `folder` where it is missing."""
    path = folder / name
    if not path.exists():
        architecture, model_type, values = MODELS[name]
        path.mkdir()
        config = _COMMON | {"architectures": [architecture], "model_type": model_type} | values
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
