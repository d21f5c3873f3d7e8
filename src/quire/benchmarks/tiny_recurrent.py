"""Sizes of tiny models with recurrent layers, over those that all tiny models share (`tiny_models.py`)."""

from typing import Any

_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12}

RECURRENT: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {"intermediate_size": 120, "state_size": 10, "time_step_rank": 7, "tie_word_embeddings": True},
    "FalconMambaForCausalLM": {"intermediate_size": 120, "state_size": 10, "time_step_rank": 7},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12, "chunk_size": 16},
    "JambaForCausalLM": {
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 10, "mamba_dt_rank": 7,
        "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "BambaForCausalLM": {**_MAMBA2, "attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {
        **_MAMBA2, "mamba_d_ssm": 96, "mamba_n_heads": 6,  "key_multiplier": 0.7, "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.9, "mlp_multipliers": [0.8, 0.7], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    },
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"], "head_dim": 16,
        "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 16,
    },
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 6, "num_mem_blocks": 2, "n_mamba_heads": 8, "mamba_d_state": 8, "adapter_rank": 10,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention"],
        "tie_word_embeddings": True,
    },
    "GraniteMoeHybridForCausalLM": {
        **_MAMBA2,  "shared_intermediate_size": 72,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "Lfm2ForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 16,
        "tie_word_embeddings": True,
    },
    "Lfm2MoeForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "tie_word_embeddings": True,
    },
    "Qwen3NextForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
        "linear_value_head_dim": 20, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "Qwen3_5ForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
    },
}  # fmt: skip
RECURRENT["Qwen3_5MoeForCausalLM"] = RECURRENT["Qwen3NextForCausalLM"]
