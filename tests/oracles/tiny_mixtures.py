"""Sizes of tiny models with mixtures of experts, latent attention or recurrent layers, over those that all share."""

from typing import Any

MIXTURES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_shared_experts": 2,
        "head_dim": 16, "sliding_window": 9, "global_attn_every_n_layers": 3, "route_scale": 1.5,
        "mup_enabled": True,
    },
    "Cohere2MoeForCausalLM": {
        "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9,
        "sliding_window_pattern": 2, "prefix_dense_intermediate_size": 72, "logit_scale": 0.6,
        "num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "Dots1ForCausalLM": {
        "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts":
        2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "sliding_window": None,
    },
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2,
    },
    "ExaoneMoeForCausalLM": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_shared_experts": 2,
        "sliding_window": 9, "sliding_window_pattern": 3,
    },
    "FlexOlmoForCausalLM": {
        "num_experts": 5, "num_experts_per_tok": 2,
    },
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts":
        2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "head_dim": 16, "use_qk_norm": True,
    },
    "Glm4MoeLiteForCausalLM": {
        "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_routed_experts": 8, "moe_intermediate_size": 24,
    },
    "GptOssForCausalLM": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9,
    },
    "GraniteMoeForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "GraniteMoeSWAForCausalLM": {
        "num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0,
        "shared_intermediate_size": 56, "sliding_window": 9, "layer_rope_theta": [0, 10000.0, 500.0],
    },
    "GraniteMoeSharedForCausalLM": {
        "num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0,
        "shared_intermediate_size": 56,
    },
    "HYV3ForCausalLM": {
        "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "num_shared_experts": 2,
        "moe_intermediate_size": 40,
    },
    "HunYuanMoEV1ForCausalLM": {
        "num_experts": 6, "moe_topk": 2, "head_dim": 16,
    },
    "Llama4ForCausalLM": {
        "num_hidden_layers": 4, "num_local_experts": 5, "head_dim": 16, "intermediate_size": 40,
        "intermediate_size_mlp": 72, "interleave_moe_layer_step": 2, "attention_chunk_size": 12,
        "floor_scale": 8, "attn_scale": 0.5, "moe_layers": None, "no_rope_layers": None,
    },
    "MellumForCausalLM": {
        "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 40,
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "Step3p5ForCausalLM": {
        "num_hidden_layers": 4, "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "share_expert_dim": 32, "sliding_window": 9, "num_sliding_attention_heads": 6, "moe_router_scaling_factor": 1.7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "MiniMaxM2ForCausalLM": {
        "num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 16,
    },
    "Mistral4ForCausalLM": {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0,
        "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1, "mscale":
        0.7, "mscale_all_dim": 0.9, "llama_4_scaling_beta": 0.3, "partial_rotary_factor":
        0.3333333333333333},
    },
    "OlmoeForCausalLM": {
        "num_experts": 6, "num_experts_per_tok": 2,
    },
    "PhimoeForCausalLM": {
        "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True,
    },
    "SolarOpenForCausalLM": {
        "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts":
        2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "head_dim": 16,
    },
    "YoutuForCausalLM": {
        "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "tie_word_embeddings": True, "pad_token_id": None,
    },
}  # fmt: skip


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
    "Lfm3ForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "head_dim": 16,
        "sliding_window": 9, "tie_word_embeddings": True,
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
    "KimiLinearForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "linear_head_dim": 12, "linear_num_heads": 6, "num_local_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "BailingHybridForCausalLM": {
        "num_hidden_layers": 4, "layer_group_size": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 12,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "num_local_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
    },
    "MiniMaxForCausalLM": {
        "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "block_size": 16,
        "linear_attn_alpha_factor": 1.6, "linear_attn_beta_factor": 0.8, "full_attn_alpha_factor": 1.3, "mlp_alpha_factor": 1.4,
        "full_attn_beta_factor": 0.7, "mlp_beta_factor": 0.9,
    },
    "RecurrentGemmaForCausalLM": {
        "num_hidden_layers": 4, "block_types": ["recurrent", "attention", "recurrent"], "attention_window_size": 9,
        "lru_width": 72, "logits_soft_cap": 8.0, "tie_word_embeddings": True,
    },
    "InklingForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], "head_dim": 24,
        "swa_num_attention_heads": 12, "swa_num_key_value_heads": 6, "swa_head_dim": 16, "d_rel": 5, "sliding_window_size": 9,
        "rel_extent": 21, "log_scaling_n_floor": 11, "log_scaling_alpha": 0.4, "moe_intermediate_size": 24,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "route_scale": 1.7, "logits_mup_width_multiplier": 1.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    },
    "RwkvForCausalLM": {"num_hidden_layers": 4, "rescale_every": 3},
    "OlmoHybridForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 12,
    },
}  # fmt: skip
RECURRENT["Qwen3_5MoeForCausalLM"] = RECURRENT["Qwen3NextForCausalLM"]
RECURRENT["InklingForConditionalGeneration"] = RECURRENT["InklingForCausalLM"]
MIXTURES["Step3p7ForConditionalGeneration"] = MIXTURES["Step3p5ForCausalLM"]
