"""Qwen2 and Qwen3 (dense): Llama's plan with biases on q, k, v (2), or norms on query and key heads (3)."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import llama
from quire.models.registry import register
from quire.models.spec import Attention, DecoderSpec, RMSNorm


def window_of_layers(hf: HFConfig) -> tuple[int, ...]:
    """Each layer's window: by `layer_types` where given, else all layers from `max_window_layers` on."""
    window = hf.get("sliding_window", 0) if hf.get("use_sliding_window", False) else 0
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 0)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(hf.num_hidden_layers)]
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _with_attention(hf: HFConfig, qkv_bias: bool, qk_norm: RMSNorm | None) -> DecoderSpec:
    spec = llama(hf)
    (base, *_) = spec.mixers()
    mixer: tuple[Attention, ...] = tuple(
        dataclasses.replace(base, window=window, qkv_bias=qkv_bias, qk_norm=qk_norm) for window in window_of_layers(hf)
    )
    return dataclasses.replace(spec, mixer=mixer)


@register("Qwen2ForCausalLM")
def qwen2(hf: HFConfig) -> DecoderSpec:
    """Qwen2 and Qwen2.5: biases on q, k and v, none on the output."""
    return _with_attention(hf, qkv_bias=True, qk_norm=None)


@register("Qwen3ForCausalLM")
def qwen3(hf: HFConfig) -> DecoderSpec:
    """Qwen3: an RMS norm over each query and key head; head_dim stands in the config (128 where it does not)."""
    hf = HFConfig({"head_dim": 128} | hf.to_dict())
    return _with_attention(hf, qkv_bias=bool(hf.get("attention_bias", False)), qk_norm=RMSNorm(hf.rms_norm_eps))
