"""Molmo 2: Qwen3's or OLMo 3's layers under names of their own, and images whose tokens see one another."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import defaults, renamed, with_layers
from quire.models.registry import register
from quire.models.residual import POST, PRE, RMSNorm
from quire.models.spec import DecoderSpec, GatedMLP
from quire.models.vision.pooled import molmo2_vision

NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        embedding="transformer.wte.embedding",
        qkv="self_attn.att_proj",
        out="self_attn.attn_out",
        gate_up="mlp.ff_proj",
        down="mlp.ff_out",
        before_mixer="attn_norm",
        before_mlp="ff_norm",
        final_norm="transformer.ln_f",
    ),
    layer="transformer.blocks.{layer}.",
    bare=("embedding",),
)
POST_NAMES = NAMES.but(drop=("before_mixer", "before_mlp"), after_mixer="attn_norm", after_mlp="ff_norm")


@register("Molmo2ForConditionalGeneration")
def molmo2(hf: HFConfig) -> DecoderSpec:
    """Molmo 2. The tokens behind its vocabulary stand in images alone."""
    text = renamed(hf.text_config, attention_bias="qkv_bias", rms_norm_eps="layer_norm_eps")
    text = defaults(text, tie_word_embeddings=False)
    norm = RMSNorm(text.get("rms_norm_eps", 1e-6))
    span = "all" if text.get("qk_norm_type", "qwen3") == "olmo" else "head"
    spec = llama(text).with_attention(qk_norm=norm, qk_norm_span=span, out_bias=False)
    mlp = GatedMLP(text.intermediate_size, act=text.get("hidden_act", "silu"), up_first=True)
    scaled = text.get("rope_scaling_layers")
    rope = spec.attentions()[0].rope
    if scaled is not None and rope is not None:
        plain = dataclasses.replace(rope, scaling=None)
        spec = with_layers(spec, tuple(layer not in scaled for layer in range(spec.layers)), rope=plain)
    placement, names = (POST, POST_NAMES) if text.get("norm_after", False) else (PRE, NAMES)
    parts = {"mlp": mlp, "placement": placement, "weights": names, "vision": molmo2_vision(hf)}
    return dataclasses.replace(spec.with_attention(sees_items=True), **parts)
