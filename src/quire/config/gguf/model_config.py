"""From a GGUF file's metadata to the config.json of the same model.

Knows the names of metadata (`llama.block_count`) and of config.json's fields. Rotary factors are read from the file's own
tensors, which hold what config.json says in other words.
"""

import struct
from typing import Any, cast

from quire.config.gguf.container import TYPES, GGUFFile
from quire.config.gguf.families import FAMILIES, NOT_WEIGHTS, Family, checkpoint_name
from quire.errors import ConfigError

PLAIN = ("F32", "F16", "BF16")
PACKED = tuple(kind.name for kind in TYPES.values() if kind.values > 1)


def family_of(file: GGUFFile) -> Family:
    """Raises ConfigError where the file's architecture is not one of ours."""
    name = file.metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ConfigError(
            f"{file.path} has general.architecture={name!r}, which is not supported; supported: {', '.join(FAMILIES)}",
            setting="model",
        )
    family = FAMILIES[str(name)]
    if family.windowed is not None and _fact(file, "attention.sliding_window"):
        return family.windowed
    return family.mixture if family.mixture is not None and _fact(file, "expert_count", 0) else family


def _fact(file: GGUFFile, name: str, default: Any = None) -> Any:
    return file.metadata.get(f"{file.metadata['general.architecture']}.{name}", default)


def _needed(file: GGUFFile, name: str) -> Any:
    value = _fact(file, name)
    if value is None:
        message = f"{file.path} lacks {file.metadata['general.architecture']}.{name} in its metadata"
        raise ConfigError(message, setting="model")
    return value


def build_config(files: list[GGUFFile]) -> dict[str, Any]:
    """config.json's content; `quantization_config` says where the tensors are and of which type. `files`: the file, or all of
    a split one, the first of which has the metadata.
    Raises ConfigError: an architecture, a number type or a tensor that is not supported, or a fact is missing."""
    first, family = files[0], family_of(files[0])
    heads, hidden = int(_needed(first, "attention.head_count")), int(_needed(first, "embedding_length"))
    embedding = next((file.tensors["token_embd.weight"] for file in files if "token_embd.weight" in file.tensors), None)
    if embedding is None:
        raise ConfigError(f"{first.path} has no token_embd.weight", setting="model")

    def has(name: str) -> bool:
        return any(name in file.tensors for file in files)

    names = ("bos", "eos", "eot", "eom", "padding")
    ids = {name: first.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    ends = dict.fromkeys(
        ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None
    )  # of a text, a turn, a message
    window = _fact(first, "attention.sliding_window")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": int(_needed(first, "block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_fact(first, "attention.head_count_kv", heads)),
        "head_dim": int(_fact(first, "attention.key_length", hidden // heads)),
        "intermediate_size": int(_needed(first, "feed_forward_length")),
        "max_position_embeddings": int(_needed(first, "context_length")),
        **_epsilon(first),
        "rope_theta": float(_fact(first, "rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "torch_dtype": {"F32": "float32", "F16": "float16"}.get(embedding.type.name, "bfloat16"),
        "tie_word_embeddings": not has("output.weight"),
        "attention_bias": has("blk.0.attn_q.bias") and family.model_type in BIASED,
        "bos_token_id": ids["bos"],
        "eos_token_id": [*ends] or None,
        "pad_token_id": ids["padding"],
        **({"sliding_window": int(window)} if window else {}),
        **_own_facts(first, family),
    }
    config |= {ours: has(tensor) for ours, tensor in PRESENT.get(family.model_type, {}).items()}
    rotated = int(_fact(first, "rope.dimension_count", config["head_dim"]))
    if rotated != config["head_dim"]:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    scaling = _rope_scaling(files, config["max_position_embeddings"])
    if scaling is not None:
        config["rope_scaling"] = scaling | ({"truncate": False} if family.model_type == "gpt_oss" else {})
    config["quantization_config"] = {
        "quant_method": "gguf",
        "files": [file.path for file in files],
        "types": _types(files, family),
    }
    return config


def _epsilon(file: GGUFFile) -> dict[str, float]:
    """What is added in norms, under the names that configurations have for it."""
    plain = _fact(file, "attention.layer_norm_epsilon")
    if plain is not None:
        return dict.fromkeys(("layer_norm_eps", "norm_epsilon"), float(plain))
    return {"rms_norm_eps": float(_needed(file, "attention.layer_norm_rms_epsilon"))}


_EXPERTS = {"num_experts_per_tok": "expert_used_count"}
_MIXTURE = {"num_experts": "expert_count", **_EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"}
NEEDED: dict[str, dict[str, str]] = {
    "mixtral": {"num_local_experts": "expert_count", **_EXPERTS},
    "gpt_oss": {"num_local_experts": "expert_count", **_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
    "qwen2_moe": _MIXTURE,
    "qwen3_moe": _MIXTURE,
    "granite": {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    "cohere": {"logit_scale": "logit_scale"},
    "cohere2": {"logit_scale": "logit_scale"},
}
"""Of families with facts of their own: what their configurations call them, and what the file does."""
OR_ELSE: dict[str, dict[str, tuple[str, Any]]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", 0)},
    "qwen3_moe": {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", 0)},
    "gemma2": {
        "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": ("final_logit_softcapping", 30.0),
    },
    "gemma3_text": {"rope_local_base_freq": ("rope.freq_base_swa", 10000.0)},
}
"""The same of what a file need not have, with what holds then; 0 is left out."""
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
FIXED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"sliding_window_pattern": 6},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh"},
}
"""What no file of the family says."""
PRESENT = {
    "seed_oss": {"attention_out_bias": "blk.0.attn_output.bias"},
    "starcoder2": {"use_bias": "blk.0.attn_q.bias"},
    "cohere": {"use_qk_norm": "blk.0.attn_q_norm.weight"},
}
"""What a family's configuration says of a tensor that may be there."""
BIASED = ("llama", "granite", "seed_oss", "hunyuan_v1_dense", "glm4", "olmo2", "olmo3", "starcoder2", "gpt_oss")
"""Families whose configurations say whether queries, keys and values have biases."""


def _own_facts(file: GGUFFile, family: Family) -> dict[str, Any]:
    """What only some families have."""
    kind = family.model_type
    facts = {ours: _needed(file, theirs) for ours, theirs in NEEDED.get(kind, {}).items()}
    found = {ours: _fact(file, *where) for ours, where in OR_ELSE.get(kind, {}).items()}
    facts |= {ours: value for ours, value in found.items() if value} | FIXED.get(kind, {})
    if kind.startswith("gemma"):
        facts["query_pre_attn_scalar"] = _query_scalar(file, kind)
    pattern = _fact(file, "attention.sliding_window_pattern")
    if isinstance(pattern, list):
        facts["layer_types"] = [
            "sliding_attention" if slides else "full_attention" for slides in cast(list[bool], pattern)
        ]
    return facts


def _query_scalar(file: GGUFFile, kind: str) -> float:
    """The heads' size, but for the largest models, whose queries are scaled by the model's width a head."""
    heads, hidden = int(_needed(file, "attention.head_count")), int(_needed(file, "embedding_length"))
    layers, head_dim = int(_needed(file, "block_count")), int(_fact(file, "attention.key_length", hidden // heads))
    largest = {"gemma2": 46, "gemma3_text": 62}
    return hidden / heads if layers == largest.get(kind) else head_dim


def _rope_scaling(files: list[GGUFFile], max_positions: int) -> dict[str, Any] | None:
    long, short = (_floats(files, f"rope_factors_{length}.weight") for length in ("long", "short"))
    original = int(_fact(files[0], "rope.scaling.original_context_length", 0)) or max_positions
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "factor": max_positions / original,
            "original_max_position_embeddings": original,
        }
    divisors = _floats(files, "rope_freqs.weight")
    if divisors is not None:  # Llama 3.1's stretch, worked out for each pair
        return {
            "rope_type": "longrope",
            "long_factor": divisors,
            "short_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": max_positions,
        }
    kind, factor = _fact(files[0], "rope.scaling.type"), float(_fact(files[0], "rope.scaling.factor", 1.0))
    if kind in (None, "none") or factor == 1.0:
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{files[0].path} has rope.scaling.type={kind!r}, which is not supported; supported: none, linear, yarn",
            setting="model",
        )
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _floats(files: list[GGUFFile], name: str) -> list[float] | None:
    """A small tensor of float32."""
    for file in files:
        tensor = file.tensors.get(name)
        if tensor is None:
            continue
        if tensor.type.name != "F32" or tensor.num_bytes > 1 << 16:
            message = f"{file.path}: {name} is {tensor.type.name} {list(tensor.shape)}, not a few F32"
            raise ConfigError(message, setting="model")
        with open(file.path, "rb") as stream:
            stream.seek(tensor.offset)
            return list(struct.unpack(f"<{tensor.num_bytes // 4}f", stream.read(tensor.num_bytes)))
    return None


def _types(files: list[GGUFFile], family: Family) -> dict[str, str]:
    """The number type of every matrix that is not plain, by its name in the hub's checkpoints without `model.` and `.weight`,
    of experts without their number."""
    types: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors.values():
            name, kind = checkpoint_name(family, tensor), tensor.type.name
            is_known = tensor.name in NOT_WEIGHTS or tensor.name.endswith(".input_scale")  # activations are not rounded
            if name is None and not is_known:
                message = f"{file.path} has a tensor {tensor.name}, which {family.architecture} has not"
                raise ConfigError(message, setting="model")
            if name is None or kind in PLAIN:
                continue
            if kind not in PACKED:
                raise ConfigError(
                    f"{file.path}: {tensor.name} is {kind}, which is not supported; supported: {', '.join((*PLAIN, *PACKED))}",
                    setting="model",
                )
            types[name.removeprefix("model.").removesuffix(".weight").replace(".{expert}", "")] = kind
    return types
