"""Tiny random checkpoints in Hugging Face layout, made by Transformers itself, with a tiny byte-level tokenizer beside them.

Weights are scaled so that next-token distributions are neither ties nor certainties: an error of one position, one head
or one scale factor changes the logprobs visibly.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from tests.oracles.tiny_mixtures import MIXTURES, RECURRENT

VOCAB_SIZE = 384
"""At least 300: 256 bytes, the merges and the special tokens below, and some ids that no text makes."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
"""A language model within one that reads images or sounds too."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip

_SPARSE: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "index_topk": 12, "index_head_dim": 16,
    "index_n_heads": 16, "num_hidden_layers": 4,
}  # fmt: skip

HALVES: dict[str, Any] = {
    "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 56, "d_model": 32, "decoder_start_token_id": 300, "tie_word_embeddings": True,
}  # fmt: skip
"""Of an encoder and a decoder; every decoder's prompt begins with the start token."""
T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 12, "d_ff": 56, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20, "n_positions": 256,
    "decoder_start_token_id": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
"""As above, with buckets of several distances, and distances beyond the last."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": None},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 32},
    "Qwen3MoeForCausalLM": {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True,
    },
    "Qwen2MoeForCausalLM": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
    },
    "MixtralForCausalLM": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "GPT2LMHeadModel": {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": None, "tie_word_embeddings": True,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "Gemma2ForCausalLM": {
        "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8, "tie_word_embeddings": True,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
    },
    "Gemma3ForCausalLM": {
        "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 24, "sliding_window": 8, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB_SIZE, "final_logit_softcapping": 8.0,
    },
    "Gemma4UnifiedForCausalLM": {
        "head_dim": 16, "global_head_dim": 24, "sliding_window": 8, "tie_word_embeddings": True, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "Phi3ForCausalLM": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    "Starcoder2ForCausalLM": {"residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": None},
    "OPTForCausalLM": {"ffn_dim": 96, "dropout": 0.0, "word_embed_proj_dim": 64, "tie_word_embeddings": True},
    "GraniteForCausalLM": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0,
    },
    "GemmaForCausalLM": {"head_dim": 24, "tie_word_embeddings": True},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5, "resid_pdrop": 0.0},
    "CohereForCausalLM": {"tie_word_embeddings": True, "logit_scale": 0.6},
    "Cohere2ForCausalLM": {
        "tie_word_embeddings": True, "logit_scale": 0.6, "sliding_window": 8, "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Exaone4ForCausalLM": {
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "GPTJForCausalLM": {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "GPTBigCodeForCausalLM": {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "GPTNeoForCausalLM": {
        "num_heads": 4, "num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8,
        "tie_word_embeddings": True,
    },
    "GPTNeoXJapaneseForCausalLM": {"tie_word_embeddings": True},
    "CodeGenForCausalLM": {
        "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 256, "n_ctx": 256, "rotary_dim": 4, "n_inner": None,
    },
    "OpenAIGPTLMHeadModel": {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    },
    "BloomForCausalLM": {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True},
    "MptForCausalLM": {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256, "tie_word_embeddings": True},
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
    "HeliumForCausalLM": {"head_dim": 16},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "MinistralForCausalLM": {
        "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Olmo3ForCausalLM": {
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "CwmForCausalLM": {"sliding_window": 8},
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2},
    "StableLmForCausalLM": {"qk_layernorm": True, "use_parallel_residual": True},
    "VaultGemmaForCausalLM": {
        "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8, "tie_word_embeddings": True,
    },
    "GraniteSWAForCausalLM": {"sliding_window": 8, "attention_multiplier": 0.2, "residual_multiplier": 0.4},
    "HyperCLOVAXForCausalLM": {"residual_multiplier": 0.6, "logits_scaling": 0.5},
    "DeepseekV2ForCausalLM": {
        "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2,
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0,
    },
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE | {"index_topk_freq": 2},
    "DeepseekV4ForCausalLM": {
        "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.25, "q_lora_rank": 28,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_hash_layers": 1, "sliding_window": 10,
        "o_groups": 2, "o_lora_rank": 12, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 3, "swiglu_limit": 1.5,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention",
        "compressed_sparse_attention"], "intermediate_size": 24,
    },
    "FlintForCausalLM": {
        "head_dim": 16, "sliding_window": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [0],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "LagunaForCausalLM": {
        "head_dim": 16, "sliding_window": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "num_attention_heads_per_layer": [4, 2, 6], "moe_routed_scaling_factor": 1.5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "moe_router_logit_softcapping": 2.0,
    },
    "NanoChatForCausalLM": {"final_logit_softcapping": 8.0},
    "MiMoV2FlashForCausalLM": {
        "head_dim": 24, "v_head_dim": 20, "sliding_window": 8, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "num_key_value_heads": 2,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "HYV4ForCausalLM": {name: value for name, value in _SPARSE.items() if name not in ("n_group", "topk_group")},
    "JetMoeForCausalLM": {"kv_channels": 16, "num_local_experts": 5, "num_experts_per_tok": 2},
    "DiffLlamaForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12},
    "LongcatFlashForCausalLM": {
        "num_layers": 2, "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 28,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "moe_topk": 3,
        "n_routed_experts": 5, "zero_expert_num": 3, "expert_ffn_hidden_size": 24,
    },
    "MiniCPM3ForCausalLM": {
        "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 20, "scale_emb": 3, "dim_model_base": 40,
    },
    "BartForConditionalGeneration": HALVES,
    "MBartForConditionalGeneration": HALVES,
    "MarianMTModel": HALVES,
    "PegasusForConditionalGeneration": HALVES,
    "M2M100ForConditionalGeneration": HALVES,
    **dict.fromkeys(("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"), T5),
    "DistilBertModel": {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4},
    "ModernBertModel": {"local_attention": 16, "num_hidden_layers": 4},
}  # fmt: skip

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = (
    "the quick brown fox jumps over the lazy dog. hello world, this is a test of the engine; one two three four five. "
)


def tiny_values(architecture: str) -> dict[str, Any]:
    """The config of an architecture's tiny model, as far as it differs from Transformers' defaults."""
    return _COMMON | (_DEFAULTS | RECURRENT | MIXTURES).get(architecture, {})


def make_tiny_model(
    architecture: str,
    path: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a tiny random checkpoint and its tokenizer into the folder `path`; returns that path.

    Args:
        architecture: a Transformers class name such as `LlamaForCausalLM`.
        dtype: torch's name of the saved weights' type.
        overrides: config fields over the defaults; `max_shard_size` goes to `save_pretrained`.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    shard = overrides.pop("max_shard_size", "1GB")
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**(tiny_values(architecture) | overrides))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomize(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard)
    if tokenizer:
        write_tiny_tokenizer(path)
    return path


def load_oracle(path: str | Path, dtype: str = "float32") -> Any:
    """The checkpoint in Transformers, with its eager attention (Falcon's adds slopes twice: there with PyTorch's own)."""
    import transformers

    values = json.loads((Path(path) / "config.json").read_bytes())
    return (
        getattr(transformers, values["architectures"][0])
        .from_pretrained(
            str(path), dtype=getattr(torch, dtype), attn_implementation="sdpa" if values.get("alibi") else "eager"
        )
        .eval()
    )


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Unit-variance activations: matrices by fan-in, logits with a standard deviation of about 2.5."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    hidden, kind = config.hidden_size, type(model).__name__
    logits_std = 1.5 if getattr(config, "tie_word_embeddings", False) else 2.5
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(
            ("embed_tokens.weight", "wte.weight", "lm_head.weight", "wpe.weight", "embed_positions.weight")
        ):
            scale = logits_std / math.sqrt(hidden)
        elif parameter.dim() >= 2:
            is_transposed = kind.startswith(("GPT2", "OpenAIGPT")) and ".c_" in name
            scale = 1.0 / math.sqrt(max(parameter.shape[0 if is_transposed else -1], 1))
        else:
            scale = 0.2
        is_around_zero = kind.startswith(("Gemma", "PaliGemma", "Qwen3Next", "Qwen3_5", "Step3")) and not name.endswith(
            "attn.norm.weight"
        )
        is_around_zero &= not kind.startswith("Gemma4") and "vision_tower" not in name
        is_norm_scale = parameter.dim() == 1 and name.endswith(("weight", "scale"))
        is_norm_scale &= not is_around_zero
        parameter.copy_(noise * scale + (1.0 if is_norm_scale else 0.0))
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
        elif name.endswith("tid2eid"):
            rows = torch.rand(len(buffer), config.n_routed_experts, generator=generator)
            buffer.copy_(rows.argsort(-1)[:, : buffer.shape[1]])
        elif name.endswith(("layer_scalar", "std_scale")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.5 + 0.6)
        elif name.endswith(("put_min", "put_max", "std_bias", "running_mean", "running_var")):
            sign = {"min": -1.0, "max": 1.0, "var": 1.0}.get(name[-3:], 0.3)
            buffer.copy_(sign * (torch.rand(buffer.shape, generator=generator) + 0.5))


@functools.cache
def _tokenizer_json() -> str:
    """A byte-level BPE with 256 bytes, 40 merges and four special tokens (ids 0 to 3)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer.to_str()


def write_tiny_tokenizer(path: str | Path) -> None:
    """tokenizer.json, tokenizer_config.json (with a chat template) into a folder."""
    path = Path(path)
    (path / "tokenizer.json").write_text(_tokenizer_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": _CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
