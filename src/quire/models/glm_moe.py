"""Llama-like attention with DeepSeek-V3's kind of mixture: GLM-4.5 and later, dots.llm1."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import llama
from quire.models.mixtures import deepseek_mixture, with_deepseek_mixtures
from quire.models.qwen import window_of_layers
from quire.models.registry import register
from quire.models.spec import DecoderSpec, RMSNorm


@register("Glm4MoeForCausalLM")
def glm4_moe(hf: HFConfig) -> DecoderSpec:
    """GLM-4.5, GLM-4.5-Air, GLM-4.6: half of each head is rotated; the large ones norm queries and keys."""
    dense = llama(HFConfig({"partial_rotary_factor": 0.5} | hf.to_dict()))
    norm = RMSNorm(hf.rms_norm_eps) if hf.get("use_qk_norm", False) else None
    dense = dense.map_attention(lambda attention: dataclasses.replace(attention, out_bias=False, qk_norm=norm))
    return with_deepseek_mixtures(hf, dense, deepseek_mixture(hf))


@register("Dots1ForCausalLM")
def dots1(hf: HFConfig) -> DecoderSpec:
    """dots.llm1: norms of query and key heads, windows in some layers."""
    dense = llama(hf)
    windows, norm = window_of_layers(HFConfig(hf.to_dict() | {"use_sliding_window": True})), RMSNorm(hf.rms_norm_eps)
    (base, *_) = dense.attentions()
    mixer = tuple(dataclasses.replace(base, window=window, qk_norm=norm) for window in windows)
    return with_deepseek_mixtures(hf, dataclasses.replace(dense, mixer=mixer), deepseek_mixture(hf))
