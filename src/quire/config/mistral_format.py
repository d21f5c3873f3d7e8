"""Mistral's own layout of a checkpoint: params.json and consolidated.safetensors, as config.json and its names of tensors.

Knows names and numbers; reads nothing but the JSON. Rows of queries and keys stand in another order there, which is the
reader's to change.
"""

import os
import re
from typing import Any

from quire.config.files import read_json_object
from quire.errors import ConfigError
from quire.guards import is_dict

PARAMS = "params.json"
LAYOUT = "mistral"
"""What a configuration made here has as `weights_layout`."""
FIELDS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "vocab_size": "vocab_size",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps",
}  # fmt: skip
UNKNOWN = ("vision_encoder", "multimodal", "q_lora_rank", "kv_lora_rank", "llama_4_scaling", "conv_kernel", "lora")
"""Parts of models that are read from the other layout alone."""
NAMES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}  # fmt: skip
SUFFIXES = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
EXPERT = re.compile(r"feed_forward\.experts\.(\d+\.w[123])")
MODULE = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.(\w+)")


def read_params(folder: str) -> dict[str, Any]:
    """config.json's content by params.json.
    Raises ConfigError: a number is missing, or the model has parts that have no such layout here."""
    path = os.path.join(folder, PARAMS)
    params = read_json_object(path, setting="model")
    unknown = [name for name in UNKNOWN if params.get(name)]
    if unknown or params.get("model_type", "transformer") != "transformer":
        raise ConfigError(
            f"{path} has {', '.join(unknown) or 'model_type'}, which is not read in this layout: use the checkpoint with "
            f"config.json",
            setting="model",
        )
    missing = [name for name in FIELDS if name not in params and name != "n_kv_heads"]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}", setting="model")
    window, moe = params.get("sliding_window"), params.get("moe")
    if window is not None and not isinstance(window, int):
        raise ConfigError(f"{path} has sliding_window={window!r}, not one number", setting="model")
    config: dict[str, Any] = {ours: params[theirs] for theirs, ours in FIELDS.items() if theirs in params}
    config |= {
        "architectures": ["MixtralForCausalLM" if moe else "MistralForCausalLM"],
        "model_type": "mixtral" if moe else "mistral",
        "weights_layout": LAYOUT,
        "head_dim": params.get("head_dim") or params["dim"] // params["n_heads"],
        "hidden_act": "silu",
        "rope_theta": float(params.get("rope_theta", 10000.0)),
        "max_position_embeddings": int(params.get("max_position_embeddings") or params.get("max_seq_len") or 128000),
        "sliding_window": window,
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if is_dict(moe):
        config |= {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
    if is_dict(yarn := params.get("yarn")):
        config["rope_scaling"] = {
            "rope_type": "yarn", "factor": yarn["factor"], "beta_fast": yarn.get("beta", 32), "beta_slow": yarn.get("alpha", 1),
            "original_max_position_embeddings": yarn["original_max_position_embeddings"],
            **({} if yarn.get("apply_scale", True) else {"attention_factor": 1.0}),
        }  # fmt: skip
    if is_dict(stored := params.get("quantization")):
        if stored.get("qformat_weight") != "fp8_e4m3":
            raise ConfigError(
                f"{path} has quantization={stored!r}; supported: qformat_weight fp8_e4m3", setting="quantization"
            )
        scheme = "static" if stored.get("qscheme_act") == "TENSOR" else "dynamic"
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": scheme}
    return config


def checkpoint_name(name: str) -> str:
    """What a tensor is called in the hub's layout; itself where it is none of Mistral's."""
    found = MODULE.fullmatch(name)
    if found is None:
        return name
    layer, module, suffix = found.groups()
    expert = EXPERT.fullmatch(module)
    theirs = f"block_sparse_moe.experts.{expert[1]}" if expert else NAMES.get(module)
    if theirs is None:
        return name
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{theirs}.{SUFFIXES.get(suffix, suffix)}"
