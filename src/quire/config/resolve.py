"""Resolves a checkpoint's folder and the user's settings to the model's configuration, dtype, length and architecture.

Knows files and the names that checkpoints use. Knows nothing of torch; a platform's dtypes come as plain names.

Mistral's own layout of a checkpoint (params.json and consolidated.safetensors) is read as config.json and its names of tensors;
rows of queries and keys have another order there; the reader of the weights changes it.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from quire import envs
from quire.config import limits
from quire.config.checkpoint_files import PARAMS
from quire.config.files import read_json_object, read_json_object_if_there, tensors_in
from quire.config.hf_config import HFConfig
from quire.errors import ConfigError, Explained
from quire.guards import is_dict, is_sequence

LAYOUT = "mistral"
"""The value of `weights_layout` in a configuration that is made here."""
FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
UNKNOWN = ("vision_encoder", "multimodal", "q_lora_rank", "kv_lora_rank", "llama_4_scaling", "conv_kernel", "lora")
"""Parts of models that Quire reads only in the hub's layout."""
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
SUFFIXES = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
EXPERT = re.compile(r"feed_forward\.experts\.(\d+\.w[123])")
MODULE = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.(\w+)")


def read_params(folder: str) -> dict[str, Any]:
    """config.json's content by params.json.
    Raises ConfigError if a number is missing, or if the model has parts that Quire does not read in this layout."""
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
        config["rope_scaling"] = _rope_scaling(yarn)
    if is_dict(stored := params.get("quantization")):
        if stored.get("qformat_weight") != "fp8_e4m3":
            message = f"{path} has quantization={stored!r}; supported: qformat_weight fp8_e4m3"
            raise ConfigError(message, setting="quantization")
        scheme = "static" if stored.get("qscheme_act") == "TENSOR" else "dynamic"
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": scheme}
    return config


def _rope_scaling(yarn: dict[str, Any]) -> dict[str, Any]:
    """The hub's `rope_scaling` for Mistral's `yarn`."""
    scaling = {
        "rope_type": "yarn",
        "factor": yarn["factor"],
        "beta_fast": yarn.get("beta", 32),
        "beta_slow": yarn.get("alpha", 1),
        "original_max_position_embeddings": yarn["original_max_position_embeddings"],
    }
    return scaling if yarn.get("apply_scale", True) else scaling | {"attention_factor": 1.0}


def checkpoint_name(name: str) -> str:
    """A tensor's name in the hub's layout; unchanged if it is not one of Mistral's names."""
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


DTYPE_NAMES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HALF_OVERFLOWS = ("gemma", "glm4", "plamo2")
"""Model types whose activations float16 does not hold."""
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "model_max_length",
    "max_target_positions",
)
_TABLE_KEYS = ("n_positions", "max_target_positions")
"""Lengths of a learned table of positions: nothing can be computed beyond them."""
_UNSCALED_ROPE = ("default", "su", "longrope", "llama3", "mrope", "proportional")
"""Rope types whose checkpoints already count the scaling in max_position_embeddings."""
FALLBACK_MODEL_LEN = 2048
QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where older checkpoints describe their number format, and which that is."""


class ModelLength(NamedTuple):
    """What a checkpoint says about its longest sequence; `limit` is None where it says nothing. `usual`: what is taken unless
    more is asked for, where it is not the limit: a dynamic rope leaves a model as it is up to there, and changes every rotation
    for contexts beyond."""

    limit: int | None
    source: str
    is_table: bool = False
    usual: int | None = None


def load_hf_config(path: str, overrides: "dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]") -> HFConfig:
    """config.json of a folder (or what Mistral's params.json says of it), with the user's overrides (nested objects are
    merged).
    Raises ConfigError if there is no such file, it holds no JSON object, or an override function returns no dict."""
    file = os.path.join(path, "config.json")
    has_params = not os.path.isfile(file) and os.path.isfile(os.path.join(path, PARAMS))
    values = read_params(path) if has_params else read_json_object(file, setting="model")
    values = _unwrapped(_with_quantization(values, path))
    if callable(overrides):
        changed: object = overrides(values)
        if not is_dict(changed):
            message = f"hf_overrides must return the configuration as a dict, not {type(changed).__name__}"
            raise ConfigError(message, setting="hf_overrides")
        return HFConfig(changed)
    return HFConfig(_merge(values, overrides))


def _unwrapped(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that wraps them beside the others: retrievers wrap what a model that sees has at the top, and
    models that also speak what they think with. Of encoders of images alone, what the others tell of tokens; of those beside a
    decoder, which has a section of its own, the rows that they make. Of Molmo 2 the section of its eyes, of DeepSeek-VL2 that of
    its text."""
    if values.get("model_type") == "vit":
        return _rows_of_images(values) | values
    if values.get("model_type") == "vision-encoder-decoder":
        return _with_halves(values) | values
    if values.get("model_type") == "florence2" and "dim_embed" in (values.get("vision_config") or ()):
        message = "config.json is Florence-2's in Microsoft's own format: use the model in Transformers' (florence-community/…)"
        raise ConfigError(message, setting="model")
    if values.get("model_type") == "molmo2":
        values = {"vision_config": values.get("vit_config")} | values
    if values.get("model_type") == "deepseek_vl_v2" and is_dict(text := values.get("language_config")):
        values = {"text_config": text | {"model_type": _kind_of_deepseek(text)}} | values
    for wrapper in ("vlm_config", "thinker_config"):
        if is_dict(inner := values.get(wrapper)):
            return inner | {name: value for name, value in values.items() if name != wrapper}
    return values


def _kind_of_deepseek(text: dict[str, Any]) -> str:
    """Which of DeepSeek's models the language model of DeepSeek-VL2 is, whatever it is called there."""
    if text.get("topk_method") == "noaux_tc":
        return "deepseek_v3"
    return "deepseek_v2" if text.get("use_mla", True) else "deepseek"


def _rows_of_images(values: dict[str, Any]) -> dict[str, Any]:
    """What an encoder of images alone has in the place of tokens: a row for each patch, and one for its class."""
    size, patch = values.get("image_size", 224), values.get("patch_size", 16)
    sides = size if is_sequence(size) else (size, size)
    return {"vocab_size": 1, "max_position_embeddings": 1 + math.prod(side // patch for side in sides)}


HALVES = {"encoder": "donut-swin", "decoder": "mbart"}
"""Of a model of two halves, each with a section of its own: the known ones."""


def _with_halves(values: dict[str, Any]) -> dict[str, Any]:
    """What a model of two halves has under other names. Raises ConfigError: a half is another model."""
    for section, kind in HALVES.items():
        half = values.get(section)
        if not is_dict(half) or half.get("model_type") != kind:
            found = half.get("model_type") if is_dict(half) else half
            message = f"{section}.model_type={found!r} of config.json is not supported; known: {kind!r}"
            raise ConfigError(message, setting="model")
    return {"text_config": values["decoder"], "max_source_positions": rows_of_stages(values["encoder"])}


def rows_of_stages(eyes: dict[str, Any]) -> int:
    """The rows that a Swin makes of an image: each stage but the first halves both sides."""
    size = eyes.get("image_size", 224)
    cell = eyes.get("patch_size", 4) * 2 ** (len(eyes.get("depths", (2, 2, 6, 2))) - 1)
    sides = size if is_sequence(size) else (size, size)
    return math.prod(-(-side // cell) for side in sides)


def _with_quantization(values: dict[str, Any], path: str) -> dict[str, Any]:
    """`quantization_config`, where older checkpoints have it by another name or in a file of its own."""
    if values.get("quantization_config") is not None:
        return values
    if is_dict(values.get("compression_config")):
        return values | {"quantization_config": {"quant_method": "compressed-tensors"} | values["compression_config"]}
    for name, method in QUANTIZATION_FILES.items():
        beside = read_json_object_if_there(os.path.join(path, name), setting="model")
        if beside:
            return values | {"quantization_config": {"quant_method": method} | beside}
    return values


def _merge(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if is_dict(old) and is_dict(value) else value
    return merged


def resolve_architecture(hf_config: HFConfig) -> str:
    """The architecture that config.json names. Raises ConfigError if it names none."""
    names = hf_config.get("architectures")
    if not is_sequence(names) or not names or not isinstance(names[0], str):
        raise ConfigError(
            f"config.json names no architecture (architectures={names!r}); give one, for example with "
            'hf_overrides={"architectures": ["LlamaForCausalLM"]}',
            setting="model",
        )
    return names[0]


def resolve_dtype(
    asked: object,
    hf_config: HFConfig,
    path: str,
    supported: Explained[tuple[str, ...]],
    read_types: Callable[[], list[str]] | None = None,
    narrows: Explained[bool] | None = None,
    pools: bool = False,
) -> Explained[str]:
    """The weights' type: what was asked, or for `auto` the checkpoint's where the platform computes with it and does not narrow
    float32; a model that `pools` takes float16 then, whose vectors are more exact. `read_types`: gives the types of tensors
    whose file is not in the folder yet, as safetensors calls them.
    Raises ConfigError if there is no such type, or if the platform does not have it."""
    name = str(asked).removeprefix("torch.")
    if name != "auto":
        dtype = DTYPE_NAMES.get(name)
        if dtype is None:
            raise ConfigError(f"dtype={asked!r} is not known; allowed: auto, {', '.join(DTYPE_NAMES)}", setting="dtype")
        if dtype not in supported.value:
            message = f"dtype={asked!r}: this platform computes with {', '.join(supported.value)} ({supported.why})"
            raise ConfigError(message, setting="dtype")
        return Explained(dtype, "as asked")
    declared, source = _declared_dtype(hf_config, path, read_types)
    if declared == "float32" and narrows is not None and narrows.value:
        overflows = str(hf_config.get("model_type", "")).startswith(_HALF_OVERFLOWS)
        narrow = "float16" if pools and not overflows and "float16" in supported.value else supported.value[0]
        return Explained(narrow, f"{source} says float32, and {narrows.why}")
    if declared in supported.value:
        return Explained(declared, f"{source} says so")
    return Explained(supported.value[0], f"{source} says {declared}, which this platform has not: {supported.why}")


def _declared_dtype(hf_config: HFConfig, path: str, read_types: Callable[[], list[str]] | None) -> tuple[str, str]:
    for config in (hf_config, hf_config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            value = config.get(key) if isinstance(config, HFConfig) else None
            if isinstance(value, str) and value.removeprefix("torch.") in DTYPE_NAMES:
                return DTYPE_NAMES[value.removeprefix("torch.")], f"{key} in config.json"
    stored = _stored_dtype(path)
    if stored is None and read_types is not None:
        stored = _commonest(read_types())
    return (stored, "the weights' file") if stored else ("float32", "a checkpoint without a dtype")


def _stored_dtype(path: str) -> str | None:
    """The commonest type in the header of a folder's first safetensors file."""
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if not names:
        return None
    try:
        header = tensors_in(os.path.join(path, names[0]))
        return _commonest([str(entry.get("dtype")) for entry in header.values()])
    except (OSError, ValueError, AttributeError):
        return None  # the loader reads it again, and says what is wrong with it


def _commonest(types: list[str]) -> str | None:
    """Of what safetensors calls types, torch's name of the one that most tensors have."""
    return _SAFETENSORS_DTYPES.get(Counter(types).most_common(1)[0][0]) if types else None


def model_length(hf_config: HFConfig) -> ModelLength:
    """How long a sequence the checkpoint was made for, rope scaling counted in."""
    text = hf_config.get("text_config")
    config = text if isinstance(text, HFConfig) and "max_position_embeddings" in text else hf_config
    found = [(config.get(key), key) for key in _LENGTH_KEYS]
    lengths = [
        (value, key) for value, key in found if isinstance(value, int) and not isinstance(value, bool) and value > 0
    ]
    if not lengths:
        return ModelLength(None, "config.json names no length")
    length, key = min(lengths)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, HFConfig):
        return ModelLength(length, key, key in _TABLE_KEYS)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor = scaling.get("factor")
    if kind in _UNSCALED_ROPE or not isinstance(factor, int | float) or factor <= 1:
        return ModelLength(length, key)
    original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    return ModelLength(
        int((original or length) * factor),
        f"{'original_max_position_embeddings' if original else key} times the {kind} rope factor {factor:g}",
        usual=length if kind == "dynamic" else None,
    )


def resolve_max_model_len(
    asked: int | None, hf_config: HFConfig, tokenizer_path: str | None, *, disable_sliding_window: bool = False
) -> Explained[int]:
    """Tokens a request may have in all.
    Raises ConfigError if the setting is longer than the checkpoint allows; the message names both numbers."""
    length = model_length(hf_config)
    limit, source = length.limit, length.source
    window = hf_config.get("sliding_window")
    if disable_sliding_window and isinstance(window, int) and (limit is None or window < limit):
        limit, source = window, "sliding_window, with disable_sliding_window"
    if asked is not None:
        return _check_asked(asked, limit, source, length.is_table)
    if limit is None:
        return Explained(FALLBACK_MODEL_LEN, f"{source}: a common length")
    if length.usual is not None and length.usual < limit:
        limit, source = (
            length.usual,
            f"the length that the dynamic rope leaves as it is (up to {limit} may be asked for)",
        )
    from_tokenizer = _tokenizer_length(tokenizer_path)
    if from_tokenizer is not None and from_tokenizer < limit:
        return Explained(from_tokenizer, "model_max_length in tokenizer_config.json")
    return Explained(min(limit, limits.MAX_MODEL_LEN), f"{source} in config.json")


def _check_asked(asked: int, limit: int | None, source: str, is_table: bool) -> Explained[int]:
    if limit is None or asked <= limit:
        return Explained(asked, "as asked")
    if envs.QUIRE_ALLOW_LONG_MAX_MODEL_LEN and not is_table:
        return Explained(asked, f"as asked, beyond the model's {limit}, because QUIRE_ALLOW_LONG_MAX_MODEL_LEN is on")
    remedy = (
        f"use at most {limit}"
        if is_table
        else f"use at most {limit}, or set QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 if the model can really do more"
    )
    message = f"max_model_len={asked} is more than the model's {limit} ({source}): {remedy}"
    raise ConfigError(message, setting="max_model_len")


def _tokenizer_length(path: str | None) -> int | None:
    if path is None:
        return None
    values = read_json_object_if_there(os.path.join(path, "tokenizer_config.json"), setting="tokenizer")
    length = values.get("model_max_length")
    # Tokenizers without a limit write a huge float, 1e30 or so.
    if isinstance(length, int | float) and not isinstance(length, bool) and 0 < length <= limits.MAX_MODEL_LEN:
        return int(length)
    return None
