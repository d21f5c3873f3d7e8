"""What Transformers' config classes take for a value that config.json leaves out, where a spec would take another.

Published configs leave out what their class has by itself, above all in the `text_config` of models that also see.
"""

from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict, is_sequence

DEFAULTS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"head_dim": 128, "num_dense_layers": 1, "num_shared_experts": 2, "sliding_window": 1024},
    "ApertusForCausalLM": {
        "rope_theta": 12000000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "ArceeForCausalLM": {"rms_norm_eps": 1e-05},
    "BailingHybridForCausalLM": {
        "kv_lora_rank": 512,
        "n_shared_experts": 1,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": 6000000.0,
        "routed_scaling_factor": 2.5,
        "v_head_dim": 128,
    },
    "BambaForCausalLM": {"num_key_value_heads": 8},
    "CodeGenForCausalLM": {"rotary_dim": 64},
    "Cohere2ForCausalLM": {"logit_scale": 0.0625, "sliding_window": 4096},
    "Cohere2MoeForCausalLM": {"head_dim": 128, "sliding_window": 4096},
    "CohereForCausalLM": {"logit_scale": 0.0625, "rope_theta": 500000.0},
    "CwmForCausalLM": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "DeepseekV2ForCausalLM": {"n_shared_experts": 2, "q_lora_rank": 1536, "v_head_dim": 128},
    "DeepseekV3ForCausalLM": {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
    },
    "DeepseekV32ForCausalLM": {
        "first_k_dense_replace": 3,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "n_group": 8,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
    },
    "Dots1ForCausalLM": {
        "max_window_layers": 62,
        "norm_topk_prob": False,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    "Ernie4_5ForCausalLM": {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 500000.0},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_shared_experts": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
    },
    "Exaone4ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "ExaoneMoeForCausalLM": {"num_key_value_heads": 32, "num_shared_experts": 1, "sliding_window": 4096},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 1024, "num_key_value_heads": 8},
    "FlintForCausalLM": {"num_key_value_heads": 4},
    "FlexOlmoForCausalLM": {"rope_theta": 500000.0},
    "GPTBigCodeForCausalLM": {"activation_function": "gelu_pytorch_tanh"},
    "GPTJForCausalLM": {"rotary_dim": 64},
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
    "Glm4ForCausalLM": {"attention_bias": True, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07},
    "Glm4MoeForCausalLM": {
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
    },
    "Glm4MoeLiteForCausalLM": {
        "n_shared_experts": 1,
        "q_lora_rank": 768,
        "routed_scaling_factor": 1.8,
        "v_head_dim": 256,
    },
    "GlmMoeDsaForCausalLM": {
        "first_k_dense_replace": 3,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048,
        "rms_norm_eps": 1e-05,
        "routed_scaling_factor": 2.5,
        "v_head_dim": 256,
    },
    "GlmForCausalLM": {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07},
    "GptOssForCausalLM": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 8, "shared_intermediate_size": 1024},
    "GraniteMoeSWAForCausalLM": {"tie_word_embeddings": False},
    "GraniteSWAForCausalLM": {"num_key_value_heads": 4, "rms_norm_eps": 1e-05},
    "GteModel": {"type_vocab_size": 1},
    "HYV3ForCausalLM": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_shared_experts": 1,
        "rope_theta": 11158840.0,
        "router_scaling_factor": 2.826,
    },
    "HeliumForCausalLM": {"head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-08, "rope_theta": 100000.0},
    "JambaForCausalLM": {"num_key_value_heads": 8},
    "KimiLinearForCausalLM": {
        "kv_lora_rank": 512,
        "n_shared_experts": 1,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 2.446,
        "v_head_dim": 128,
    },
    "Llama4ForCausalLM": {
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
    "LongcatFlashForCausalLM": {"q_lora_rank": 1536, "rope_theta": 10000000.0, "v_head_dim": 128},
    "Mamba2ForCausalLM": {"tie_word_embeddings": False},
    "MellumForCausalLM": {
        "head_dim": 128,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 1024,
    },
    "MiMoV2FlashForCausalLM": {"rms_norm_eps": 1e-05},
    "MiniCPM3ForCausalLM": {"dim_model_base": 256, "q_lora_rank": 768, "scale_depth": 1.4, "scale_emb": 12},
    "MiniMaxForCausalLM": {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
    },
    "MiniMaxM2ForCausalLM": {"num_key_value_heads": 8, "rope_theta": 5000000.0},
    "Ministral3ForCausalLM": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
            "rope_type": "yarn",
        },
    },
    "MinistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Mistral4ForCausalLM": {
        "n_shared_experts": 1,
        "q_lora_rank": 1024,
        "v_head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0},
    "NanoChatForCausalLM": {"final_logit_softcapping": 15.0},
    "NemotronHForCausalLM": {"max_position_embeddings": 4096},
    "NomicBertModel": {"type_vocab_size": 2},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-05},
    "PhimoeForCausalLM": {"num_key_value_heads": 8, "rope_theta": 1000000.0},
    "Qwen2ForCausalLM": {"max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen2MoeForCausalLM": {"num_key_value_heads": 16, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "head_dim": 128,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "sliding_window": 4096},
    "Qwen3NextForCausalLM": {"head_dim": 256, "norm_topk_prob": True},
    "Qwen3_5ForCausalLM": {"head_dim": 256},
    "Qwen3_5MoeForCausalLM": {"head_dim": 256},
    "SeedOssForCausalLM": {"head_dim": 128, "num_key_value_heads": 8},
    "SmolLM3ForCausalLM": {"num_key_value_heads": 4, "rope_theta": 2000000.0},
    "SolarOpenForCausalLM": {
        "head_dim": 128,
        "n_shared_experts": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
    },
    "StableLmForCausalLM": {"num_key_value_heads": 32},
    "Starcoder2ForCausalLM": {"num_key_value_heads": 2},
    "VaultGemmaForCausalLM": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    "YoutuForCausalLM": {"q_lora_rank": 1536, "tie_word_embeddings": True, "v_head_dim": 128},
}
WHOLE = (
    "Afmoe",
    "Apertus",
    "Arcee",
    "Cohere",
    "Cwm",
    "Dots1",
    "Ernie4_5",
    "Exaone",
    "Falcon",
    "FlexOlmo",
    "GemmaF",
    "DiffLlama",
    "Flint",
    "Gemma2",
    "Gemma3",
    "GptOss",
    "Granite",
    "HYV3",
    "Helium",
    "HunYuan",
    "HyperCLOVAX",
    "Jais2",
    "JetMoe",
    "Lfm2",
    "Llama",
    "MiniMaxF",
    "Ministral",
    "Mistral",
    "Mixtral",
    "NanoChat",
    "Olmo",
    "Phimoe",
    "Qwen2",
    "Qwen3F",
    "Qwen3M",
    "SeedOss",
    "SmolLM3",
    "Starcoder2",
    "VaultGemma",
    "Zamba2",
)
"""Families whose classes rotate the whole head, whatever `partial_rotary_factor` a config has."""
LISTS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "indexer_types",
    "no_rope_layers",
    "num_experts",
    "moe_topk",
)
BASES, SECTIONS = ("rope_theta", "rotary_emb_base"), ("rope_parameters", "rope_scaling")


def completed(architecture: str, hf: HFConfig) -> HFConfig:
    """The config with its class's values for those that are missing; null is a value, but of a rotation. Lists of layers end with
    the last layer, so that `num_hidden_layers` alone may be overridden.

    Raises:
        ConfigError: a list is too short.
    """
    own = DEFAULTS.get(architecture, {})
    given = {name: value for name, value in hf.to_dict().items() if value is not None or name not in SECTIONS}
    count = given.get("num_hidden_layers")
    if isinstance(count, int) and not architecture.startswith("NemotronH"):  # which counts its list
        lists = {name: list(kinds) for name in LISTS if is_sequence(kinds := given.get(name)) and kinds}
        given |= {name: _of_layers(name, kinds, count) for name, kinds in lists.items()}
    if architecture.startswith(WHOLE):
        given = _without(given, "partial_rotary_factor")
    sections = [section for name in SECTIONS if is_dict(section := given.get(name))]
    sections += [value for section in sections for value in section.values() if is_dict(value)]  # by kind of layer
    has_base = any(where.get(name) is not None for where in (given, *sections) for name in BASES)
    known = {"rope_theta": has_base, "rope_parameters": has_base or bool(sections)}
    return HFConfig({name: value for name, value in own.items() if not known.get(name)} | given)


def _of_layers(name: str, kinds: list[Any], count: int) -> list[Any]:
    if len(kinds) < count:
        raise ConfigError(f"num_hidden_layers={count}, but {name} of config.json names {len(kinds)}", setting="model")
    return kinds[:count]


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: _without(value, name) if is_dict(value) else value for key, value in values.items() if key != name}
