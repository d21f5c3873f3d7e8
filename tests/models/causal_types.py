"""Every model type that the installed Transformers lists as a causal language model: a tiny config, and how it runs here."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from tests.oracles.tiny_models import randomize, tiny_values


@dataclasses.dataclass(frozen=True)
class Type:
    """How one model type runs.

    Attributes:
        how: by a spec, through Transformers' modules, or not at all; `sees`: its images through these modules
            (`test_parity_borrowed.py`, `test_gemma3n_sight.py`).
        values: of its config; None means those of the architecture's tiny model.
        reason: a part of what the refusal says, or several: one for each version of Transformers.
    """

    how: Literal["spec", "transformers", "sees", "refused"]
    values: dict[str, Any] | None = None
    reason: str | tuple[str, ...] = ""


COMMON: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
ENDS = {"vocab_size": 384, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
BERT = COMMON | {"num_key_value_heads": 4, "is_decoder": True}
ENCODER_DECODER = ENDS | {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 256,
}  # fmt: skip
LATENT = COMMON | {
    "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 24,
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
INDEXED = LATENT | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
INKLING = COMMON | {
    "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "d_rel": 4,
    "sliding_window_size": 8, "rel_extent": 16, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "unpadded_vocab_size": 384, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3N = COMMON | {
    "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "layer_types": 2 * SLIDING["layer_types"], "laurel_rank": 8,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 384, "num_kv_shared_layers": 2, "altup_num_inputs": 2,
    "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
}  # fmt: skip
QWEN4 = COMMON | {
    "head_dim": 16, "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "ple_embed_dim": 16,
    "linear_num_value_heads": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4,
    "num_experts_per_tok": 2, "hc_lowrank": 8, "hc_count": 2, "ngram_vocab_size_base": 100, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EYES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_EYES = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
BYTES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def _text(architecture: str, **beside: Any) -> dict[str, Any]:
    return {"text_config": tiny_values(architecture)} | beside


VALUES = "what its code computes depends on the values of its tensors"
KINDS = "which keep more of a request than keys and values"
NONE_OF = "0 of its 2 layers have attention of a kind that can keep keys and values in pages"
OTHERS = "its layers depend on more than positions and causal attention"
OWN = "its own code failed"
ASSISTANT = (
    "The set of layer types producing a cache is different",
    "inputs_embeds and shared_kv_states cannot be None",
)
LOOPS = "it runs some layers several times for each token"
SEQUENCES = "encoder-decoder models need a spec"

CHECKED = "5.24.0"
"""The newest version of Transformers that the table was made for; a newer one may list further types."""

TYPES: dict[str, Type] = {
    **dict.fromkeys(
        ("afmoe", "apertus", "arcee", "bailing_hybrid", "bamba", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "cwm",
         "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe",
         "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "gemma", "gemma2",
         "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
         "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite",
         "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium",
         "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling_text", "internlm3",
         "iquestcoder", "jais2", "jamba",
         "jetmoe", "kimi_linear", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "longcat_flash", "mamba",
         "mamba2", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "ministral", "ministral3", "mistral",
         "mixtral", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe",
         "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
         "qwen3_5_text", "qwen3_moe", "qwen3_next", "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "solar_open",
         "stablelm", "starcoder2", "vaultgemma", "youtu", "zamba2"),
        Type("spec"),
    ),
    "exaone": Type("spec", COMMON),
    "sarvam_mla": Type("spec", LATENT | {"first_k_dense_replace": 1}),
    "sarvam_moe": Type(
        "spec",
        COMMON | {
            "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "fuyu": Type("spec", {"text_config": COMMON}),
    "gemma3": Type("spec", _text("Gemma3ForCausalLM", vision_config=EYES, mm_tokens_per_image=4)),
    "gemma4": Type("spec", _text("Gemma4ForCausalLM", vision_config=None, audio_config=None)),
    "gemma4_unified": Type("spec", _text("Gemma4UnifiedForCausalLM", vision_config=None, audio_config=None)),
    "llama4": Type("spec", _text("Llama4ForCausalLM", vision_config=EYES)),
    "qwen3_5": Type("spec", _text("Qwen3_5ForCausalLM", vision_config=QWEN_EYES)),
    "qwen3_5_moe": Type("spec", _text("Qwen3_5MoeForCausalLM", vision_config=QWEN_EYES)),
    **dict.fromkeys(("bert", "bert-generation", "ernie"), Type("transformers", BERT)),
    "apertus1p5_text": Type("transformers", COMMON | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "aria_text": Type("transformers", COMMON | {"moe_num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "axk1": Type("transformers", LATENT | {"n_group": 4, "topk_group": 2}),
    "beam": Type(
        "transformers",
        COMMON | SLIDING | {
            "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2,
            "topk_group": 1, "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "biogpt": Type("transformers", COMMON | {"num_key_value_heads": 4}),
    "bitnet": Type("transformers", COMMON),
    "cohere_compass_text": Type(
        "transformers",
        COMMON | SLIDING | {
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
        },
    ),
    "ctrl": Type("transformers", ENDS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "dff": 96}),
    "electra": Type("transformers", BERT | {"embedding_size": 32}),
    "emu3": Type(
        "transformers",
        {
            "text_config": COMMON,
            "vq_config": {
                "base_channels": 32, "embed_dim": 4, "hidden_size": 32, "channel_multiplier": [1], "num_res_blocks": 1,
                "codebook_size": 50, "latent_channels": 4,
            },
        },
    ),
    "gemma3n_text": Type("transformers", GEMMA3N),
    "kolibri1": Type(
        "transformers",
        COMMON | SLIDING | {
            "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "minimax_m3_vl_text": Type(
        "transformers",
        COMMON | {
            "head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 96, "shared_intermediate_size": 24,
            "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16, "intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "modernbert-decoder": Type("transformers", COMMON | {"local_attention": 16}),
    "moshi": Type("transformers", COMMON | {"head_dim": 16, "ffn_dim": 96, "sliding_window": 32}),
    "phi4_multimodal": Type(
        "spec",
        COMMON | {
            "vision_config": EYES | {"num_hidden_layers": 2, "crop_size": 28},
            "audio_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2,
                "ext_pw_out_channel": 32, "nemo_conv_channels": 32,
            },
        },
    ),
    "roc_bert": Type(
        "transformers",
        BERT | {
            "pronunciation_vocab_size": 50, "shape_vocab_size": 50, "pronunciation_embed_dim": 16, "shape_embed_dim": 16,
        },
    ),
    "whisper": Type(
        "transformers", ENCODER_DECODER | {"is_encoder_decoder": False, "max_target_positions": 256, "max_source_positions": 32}
    ),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "mbart", "mvp", "pegasus", "plbart"),
        Type("refused", ENCODER_DECODER, SEQUENCES),
    ),
    "marian": Type("refused", ENCODER_DECODER | {"decoder_vocab_size": 384}, SEQUENCES),
    "prophetnet": Type("refused", ENDS | {"hidden_size": 64}, SEQUENCES),
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
        Type("refused", BERT, OTHERS),
    ),
    **dict.fromkeys(("big_bird", "megatron-bert", "rembert", "roformer"), Type("refused", BERT, VALUES)),
    "axk2": Type("refused", INDEXED | {"n_group": None, "topk_group": None}, KINDS),
    "blt": Type(
        "refused",
        {
            "patcher_config": BYTES,
            "encoder_config": BYTES | {"hidden_size_global": 64},
            "decoder_config": BYTES | {"hidden_size_global": 64},
            "global_config": BYTES | {"hidden_size": 64},
            "encoder_hash_byte_group_vocab": 50,
        },
        VALUES,
    ),
    "cpmant": Type(
        "refused",
        COMMON | {"dim_head": 16, "dim_ff": 96, "prompt_types": 2, "prompt_length": 4, "segment_types": 4},
        NONE_OF,
    ),
    "dbrx": Type(
        "refused",
        ENDS | {
            "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
        VALUES,
    ),
    "doge": Type("refused", COMMON, "its DogeAttention calls attention with attention_mask"),
    "dory": Type("refused", COMMON, LOOPS),
    "dots3_note": Type("refused", {}, KINDS),
    "dots3_note_text": Type(
        "refused", INDEXED | {"sliding_window": 8, "head_dim": 24, "shared_experts_intermediate_size": 24}, KINDS
    ),
    "gemma3n": Type("sees"),
    "gemma4_assistant": Type(
        "refused",
        {
            "text_config": tiny_values("Gemma4ForCausalLM") | {
                "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4,
                "use_double_wide_mlp": False,
            },
            "backbone_hidden_size": 64,
        },
        ASSISTANT,
    ),
    "gemma4_unified_assistant": Type("refused", {}, ASSISTANT),
    "git": Type("refused", BERT | {"vision_config": EYES}, "its attention does not go through Transformers' attention interface"),
    "got_ocr2": Type("sees"),
    "hrm_text": Type(
        "refused",
        COMMON | {"head_dim": 16, "num_layers_per_stack": 1, "num_hidden_layers": 8},
        LOOPS,
    ),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), Type("refused", INKLING, KINDS)),
    "lara_mini": Type("refused", COMMON, KINDS),
    "mllama": Type("refused", {"text_config": COMMON | {"cross_attention_layers": [1]}}, "1 of its 2 layers have attention"),
    "moss_transcribe_diarize": Type("refused", {}, "models that read images, audio or video need a spec"),
    "musicgen": Type("refused", {}, SEQUENCES),
    "musicgen_melody": Type("refused", {}, SEQUENCES),
    "qwen4_exp": Type("refused", {"text_config": QWEN4, "vision_config": QWEN_EYES}, KINDS),
    "qwen4_exp_text": Type("refused", QWEN4, KINDS),
    "reformer": Type(
        "refused",
        COMMON | {
            "attention_head_size": 16, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [24, 40], "is_decoder": True,
            "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16,
            "feed_forward_size": 96,
        },
        VALUES,
    ),
    "trocr": Type(
        "refused", ENDS | {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}, NONE_OF
    ),
    "xglm": Type("refused", ENDS | {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}, NONE_OF),
    "xlm": Type("refused", ENDS | {"emb_dim": 64, "n_layers": 2, "n_heads": 4}, VALUES),
    "xlnet": Type("refused", ENDS | {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96, "d_head": 16}, OWN),
    "xlstm": Type("refused", COMMON | {"embedding_dim": 64, "num_heads": 2, "num_blocks": 2}, NONE_OF),
    "xmod": Type("refused", BERT | {"default_language": "en_XX"}, VALUES),
    "zamba": Type(
        "refused",
        COMMON | {
            "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4, "mamba_dt_rank": 4,
            "num_hidden_layers": 8, "attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 8,
        },
        KINDS,
    ),
    "zaya": Type(
        "refused",
        COMMON | {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "router_hidden_size": 16},
        KINDS,
    ),
}  # fmt: skip


def make_config(model_type: str, architecture: str) -> Any:
    """The tiny config of a type, with the architecture that its checkpoints name."""
    from transformers import CONFIG_MAPPING

    values = TYPES[model_type].values
    config = CONFIG_MAPPING[model_type](**(tiny_values(architecture) if values is None else values))
    config.architectures = [architecture]
    return config


def make_model(model_type: str, architecture: str, folder: Path) -> Any:
    """A tiny random checkpoint of a type in a folder; returns Transformers' model, in float32 and with eager attention."""
    from transformers import AutoModelForCausalLM

    config = make_config(model_type, architecture)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model, seed=0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # its grouped product wants sizes that are multiples of four
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # the whole one, of models that are the text of a larger one
    return model
