"""Tiny checkpoints of architectures that Transformers lacks, made from a model of Transformers that computes the same.

A conversion renames and regroups the weights as the other architecture stores them, and writes the config that it publishes.
What the other architecture lacks is set to zero in the oracle itself, whose tensors a conversion is given.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire.models.patterns import alibi_slopes

Weights = dict[str, torch.Tensor]
Oracle = Callable[[torch.Tensor], torch.Tensor]
"""From token ids [1, T] to logits [T, V]."""

CONVERSIONS: dict[str, tuple[str, Callable[[dict[str, Any], Weights], tuple[dict[str, Any], Weights]]]] = {}


def converts(name: str, source: str):
    def decorate(function):
        CONVERSIONS[name] = (source, function)
        return function

    return decorate


def make_converted_model(name: str, path: Path, **overrides: Any) -> Oracle:
    """Write the checkpoint into the folder `path`. `overrides` are of the source's config."""
    source, convert = CONVERSIONS[name]
    make_tiny_model(source, path / "source", tokenizer=False, **overrides)
    model = load_oracle(path / "source")
    config = json.loads((path / "source/config.json").read_bytes())
    own, weights = convert(config, dict(model.state_dict()))
    if config.get("tie_word_embeddings"):
        weights = {name: value for name, value in weights.items() if "lm_head" not in name}
    save_file({name: value.clone().contiguous() for name, value in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(own))
    slopes = alibi_slopes(config["num_attention_heads"]) if name == "baichuan: 13b" else None

    def logits(token_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if slopes is None:
                return model(token_ids).logits[0]
            # At position 0 nothing rotates; slopes come in by the mask.
            length = token_ids.shape[1]
            distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
            mask = torch.tensor(slopes)[:, None, None] * distance
            mask = mask.masked_fill(distance > 0, torch.finfo(torch.float32).min)[None]
            return model(token_ids, attention_mask=mask, position_ids=torch.zeros_like(token_ids)).logits[0]

    return logits


def renamed(weights: Weights, *pairs: tuple[str, str]) -> Weights:
    """Parts of names replaced, in order."""
    found: Weights = {}
    for name, value in weights.items():
        for old, new in pairs:
            name = name.replace(old, new)
        found[name] = value
    return found


def fused(weights: Weights, sources: tuple[str, ...], target: str, groups: int = 1) -> Weights:
    """Rows of several modules of each layer as one, group by group."""
    found = dict(weights)
    for name in weights:
        head, dot, suffix = name.rpartition(".")
        if head.endswith(sources[0]):
            prefix = head.removesuffix(sources[0])
            parts = [found.pop(f"{prefix}{source}.{suffix}").unflatten(0, (groups, -1)) for source in sources]
            found[f"{prefix}{target}{dot}{suffix}"] = torch.cat(parts, 1).flatten(0, 1)
    return found


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def common(config: dict[str, Any], architecture: str, *keys: str) -> dict[str, Any]:
    """What most configs have."""
    keys = keys or (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "hidden_size",
    )
    kept = {key: config[key] for key in (*keys, "vocab_size", "tie_word_embeddings")}
    return kept | {"architectures": [architecture], "rope_theta": 10000.0}


@converts("internlm2", "LlamaForCausalLM")
def internlm2(config, weights):
    weights = fused(weights, QKV, "attention.wqkv", config["num_key_value_heads"])
    weights = renamed(
        weights, ("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"), ("embed_tokens", "tok_embeddings"), ("lm_head", "output"),
    )  # fmt: skip
    own = common(config, "InternLM2ForCausalLM")
    return own | {"bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 256}, weights


@converts("internlm", "LlamaForCausalLM")
def internlm(config, weights):
    own = common(config, "InternLMForCausalLM") | {"bias": True, "max_position_embeddings": 256, "hidden_act": "silu"}
    return own | {"rms_norm_eps": 1e-6}, weights


@converts("internlm3", "LlamaForCausalLM")
def internlm3(config, weights):
    own = common(config, "InternLM3ForCausalLM") | {"bias": True, "qkv_bias": True, "max_position_embeddings": 256}
    return own | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": config["head_dim"]}, weights


@converts("olmo3: before rope_parameters", "Olmo3ForCausalLM")
def old_olmo3(config, weights):
    own = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    scaling = config["rope_parameters"]["full_attention"]
    return own | {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}, weights


@converts("baichuan: 7b", "LlamaForCausalLM")
def baichuan_7b(config, weights):
    own = common(config, "BaiChuanForCausalLM") | {"hidden_act": "silu", "rms_norm_eps": 1e-6}
    del own["num_key_value_heads"]
    return own | {"max_position_embeddings": 256, "model_max_length": 256}, fused(weights, QKV, "self_attn.W_pack")


@converts("baichuan: 13b", "LlamaForCausalLM")
def baichuan_13b(config, weights):
    own, weights = baichuan_7b(config, weights)
    del own["max_position_embeddings"]
    return own | {"architectures": ["BaichuanForCausalLM"]}, weights


@converts("qwen", "Qwen2ForCausalLM")
def qwen(config, weights):
    weights = renamed(
        fused(weights, QKV, "attn.c_attn"), ("model.layers", "transformer.h"), ("self_attn.o_proj", "attn.c_proj"),
        ("gate_proj", "w2"), ("up_proj", "w1"), ("mlp.down_proj", "mlp.c_proj"), ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"), ("model.embed_tokens", "transformer.wte"), ("model.norm", "transformer.ln_f"),
    )  # fmt: skip
    own = common(config, "QWenLMHeadModel", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return own | {
        "intermediate_size": 2 * config["intermediate_size"], "kv_channels": 16, "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 256, "seq_length": 256, "rotary_emb_base": 10000, "rotary_pct": 1.0, "no_bias": True,
        "scale_attn_weights": True, "use_dynamic_ntk": True, "use_logn_attn": True,
    }, weights  # fmt: skip


@converts("exaone", "LlamaForCausalLM")
def exaone(config, weights):
    weights = renamed(
        weights, ("model.layers", "transformer.h"), ("self_attn.o_proj", "attn.attention.out_proj"),
        ("self_attn.", "attn.attention."), ("gate_proj", "c_fc_0"), ("up_proj", "c_fc_1"), ("down_proj", "c_proj"),
        ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"), ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
    )  # fmt: skip
    own = common(
        config, "ExaoneForCausalLM", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"
    )
    return own | {
        "num_layers": config["num_hidden_layers"], "activation_function": "silu", "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 256, "head_dim": config["head_dim"],
    }, weights  # fmt: skip


@converts("telechat2", "LlamaForCausalLM")
def telechat2(config, weights):
    heads = config["num_key_value_heads"]
    for name in [
        name for name in weights if name.endswith(".bias") and not name.endswith(("o_proj.bias", "down_proj.bias"))
    ]:
        weights.pop(name).zero_()
    weights = renamed(
        fused(weights, QKV[1:], "self_attention.key_value", heads), ("model.layers", "transformer.h"),
        ("self_attn.q_proj", "self_attention.query"), ("self_attn.o_proj", "self_attention.dense"),
        ("model.embed_tokens", "transformer.word_embeddings"), ("model.norm", "transformer.ln_f"),
    )  # fmt: skip
    own = common(config, "TeleChat2ForCausalLM", "hidden_size", "num_key_value_heads")
    return own | {
        "n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"], "layer_norm_epsilon": 1e-6,
        "ffn_hidden_size": config["intermediate_size"], "seq_length": 256,
    }, weights  # fmt: skip


@converts("telechat: trained on more than its base length", "LlamaForCausalLM")
def telechat(config, weights):
    """Version 1: the base grows by 3 ** (16 / 14) where the length doubled once."""
    own, weights = telechat2(config, weights)
    return own | {"architectures": ["TelechatForCausalLM"], "base_seqlen": 128, "training_seqlen": 256}, weights


@converts("pangu embedded", "LlamaForCausalLM")
def pangu_embedded(config, weights):
    own = common(config, "PanguEmbeddedForCausalLM") | {
        "bias": True,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
    }
    return own | {"rms_norm_eps": 1e-6}, weights


@converts("minicpm", "GraniteForCausalLM")
def minicpm(config, weights):
    own = common(config, "MiniCPMForCausalLM") | {"hidden_act": "silu", "rms_norm_eps": 1e-6}
    return own | {
        "scale_emb": config["embedding_multiplier"], "dim_model_base": config["hidden_size"] / config["logits_scaling"],
        "scale_depth": config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5, "max_position_embeddings": 256,
    }, weights  # fmt: skip


@converts("teleflm", "GraniteForCausalLM")
def teleflm(config, weights):
    own = common(config, "TeleFLMForCausalLM") | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "use_mup": True}
    return own | {
        "input_mult": config["embedding_multiplier"], "output_mult": 3.0, "mup_scale_factor": 3.0 * config["logits_scaling"],
        "max_position_embeddings": 256,
    }, weights  # fmt: skip


@converts("chatglm", "GlmForCausalLM")
def chatglm(config, weights):
    weights = renamed(
        fused(weights, QKV, "self_attention.query_key_value"), ("model.layers", "transformer.encoder.layers"),
        ("self_attn.o_proj", "self_attention.dense"), ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"), ("model.embed_tokens", "transformer.embedding.word_embeddings"),
        ("model.norm", "transformer.encoder.final_layernorm"), ("lm_head", "transformer.output_layer"),
    )  # fmt: skip
    weights["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    own = common(config, "ChatGLMModel", "hidden_size", "num_attention_heads")
    own["padded_vocab_size"] = own.pop("vocab_size")
    return own | {
        "num_layers": config["num_hidden_layers"], "kv_channels": config["head_dim"], "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"], "ffn_hidden_size": config["intermediate_size"],
        "seq_length": 256, "add_qkv_bias": True, "add_bias_linear": False, "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": 1, "rmsnorm": True, "apply_residual_connection_post_layernorm": False, "post_layer_norm": True,
    }, weights  # fmt: skip


@converts("chatglm: saved after training", "GlmForCausalLM")
def chatglm_for_conditional_generation(config, weights):
    own, weights = chatglm(config, weights)
    del own["rope_theta"]
    return own | {"architectures": ["ChatGLMForConditionalGeneration"], "rope_ratio": 50}, weights


@converts("orion", "StableLmForCausalLM")
def orion(config, weights):
    own = common(config, "OrionForCausalLM") | {"hidden_act": "silu", "rms_norm_eps": config["layer_norm_eps"]}
    return own | {"max_position_embeddings": 256}, weights


@converts("mimo", "Qwen2ForCausalLM")
def mimo(config, weights):
    own = common(config, "MiMoForCausalLM") | {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
    }
    weights["model.mtp_layers.0.input_proj.weight"] = torch.ones(3, 5)
    return own | {"attention_bias": True, "head_dim": 16, "num_nextn_predict_layers": 1}, weights


@converts("gemma3 that sees", "Gemma3ForCausalLM")
def gemma3_that_sees(config, weights):
    weights = {f"language_model.{name}": value for name, value in weights.items()}
    weights["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(7)
    weights["multi_modal_projector.mm_input_projection_weight"] = torch.ones(7, 5)
    text = {key: value for key, value in config.items() if key not in ("architectures", "rope_parameters")}
    text |= {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    return {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}, weights


@converts("mistral3 that sees", "MistralForCausalLM")
def mistral3_that_sees(config, weights):
    """As Transformers stores it since its version 5."""
    weights = {name.replace("model.", "model.language_model."): value for name, value in weights.items()}
    weights["model.vision_tower.ln_pre.weight"] = torch.ones(7)
    own = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    return own, weights


@converts("fuyu", "PersimmonForCausalLM")
def fuyu(config, weights):
    weights = {f"language_model.{name}": value for name, value in weights.items()}
    weights["vision_embed_tokens.weight"] = torch.ones(7, 5)
    return {"architectures": ["FuyuForCausalLM"], "text_config": config, "tie_word_embeddings": False}, weights


@converts("falcon: before Transformers had it", "FalconForCausalLM")
def old_falcon(config, weights):
    own = {
        "architectures": ["RWForCausalLM"], "vocab_size": config["vocab_size"], "hidden_size": config["hidden_size"],
        "n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"], "n_head_kv": 2, "alibi": False,
        "bias": False, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": True,
        "layer_norm_epsilon": config["layer_norm_epsilon"],
    }  # fmt: skip
    return own, weights


@converts("pythia: before rope_parameters", "GPTNeoXForCausalLM")
def old_pythia(config, weights):
    kept = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "layer_norm_eps",
    )
    own = {key: config[key] for key in kept} | {"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu"}
    weights = renamed(weights, ("lm_head", "embed_out")) | {
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2)
    }
    return own | {
        "max_position_embeddings": 256, "rotary_emb_base": 500, "rotary_pct": 0.5, "use_parallel_residual": True,
        "tie_word_embeddings": False,
    }, weights  # fmt: skip


@converts("decilm", "LlamaForCausalLM")
def decilm(config, weights):
    """Layer 0 keeps only its feed-forward, layer 1 only its attention (the oracle's other halves give zeros); in layer 2 all
    queries share one key and value (the oracle has copies)."""
    lacking = ("0.self_attn", "0.input_layernorm", "1.mlp", "1.post_attention_layernorm")
    for name, value in list(weights.items()):
        if name.startswith(tuple(f"model.layers.{module}" for module in lacking)):
            weights.pop(name)
            if value.dim() == 2:
                value.zero_()
        elif name.startswith(("model.layers.2.self_attn.k_proj", "model.layers.2.self_attn.v_proj")):
            value[16:] = value[:16]
            weights[name] = value[:16]
    full = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}
    mlp = {"ffn_mult": 6.0, "no_op": False, "replace_with_linear": False}
    own = common(config, "DeciLMForCausalLM", "hidden_size", "num_attention_heads", "num_hidden_layers") | {
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "intermediate_size": None,
        "num_key_value_heads": None,
        "block_configs": [
            {"attention": full | {"n_heads_in_group": None, "no_op": True}, "ffn": mlp},
            {"attention": full, "ffn": mlp | {"ffn_mult": None, "no_op": True}},
            {"attention": full | {"n_heads_in_group": 4}, "ffn": mlp},
        ],
    }  # fmt: skip
    return own, weights
