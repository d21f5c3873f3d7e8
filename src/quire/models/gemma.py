"""Gemma 1 to 3 (text): norm weights stored minus one, scaled embeddings, sandwich norms (2, 3), soft caps (2), q/k norms (3)."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES
from quire.models.patterns import defaults, full_where_not_sliding, sliding_layers, with_layers
from quire.models.registry import register
from quire.models.residual import PRE, SANDWICH, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP

SANDWICH_NAMES = LLAMA_NAMES.but(
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@register("GemmaForCausalLM")
def gemma(hf: HFConfig) -> DecoderSpec:
    """Gemma 1; its first configs say "gelu" and mean its tanh form."""
    first = hf.get("hidden_act", "gelu")
    act = hf.get("hidden_activation") or ("gelu_pytorch_tanh" if first == "gelu" else first)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=hf.head_dim,
            rope=Rope.from_hf(hf, hf.head_dim, "full_attention"),
            qkv_bias=bool(hf.get("attention_bias", False)),
            out_bias=bool(hf.get("attention_bias", False)),
        ),
        mlp=GatedMLP(hf.intermediate_size, act=act),
        norm=RMSNorm(hf.rms_norm_eps, weight_offset=1.0),
        weights=LLAMA_NAMES,
        max_positions=hf.max_position_embeddings,
        embedding_scale=hf.hidden_size**0.5,
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


@register("Gemma2ForCausalLM")
def gemma2(hf: HFConfig) -> DecoderSpec:
    """Gemma 2: every second layer sees a window; soft caps on scores and logits."""
    spec = gemma(defaults(hf, hidden_activation="gelu_pytorch_tanh"))
    spec = spec.with_attention(scale=hf.query_pre_attn_scalar**-0.5, soft_cap=hf.get("attn_logit_softcapping", 0.0))
    return dataclasses.replace(
        full_where_not_sliding(spec, hf, every=2),
        placement=SANDWICH,
        weights=SANDWICH_NAMES,
        logits_soft_cap=hf.get("final_logit_softcapping", 0.0),
    )


@register("VaultGemmaForCausalLM")
def vaultgemma(hf: HFConfig) -> DecoderSpec:
    """VaultGemma: Gemma 2 with norms before each half only."""
    return dataclasses.replace(
        gemma2(hf), placement=PRE, weights=LLAMA_NAMES.but(before_mlp="pre_feedforward_layernorm")
    )


@register("Gemma3ForCausalLM")
def gemma3(hf: HFConfig) -> DecoderSpec:
    """Gemma 3 (text): five windowed layers with their own rotary base, then a full one; norms on query and key heads."""
    hf = defaults(
        hf, sliding_window_pattern=6, num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262208,
        rms_norm_eps=1e-6, query_pre_attn_scalar=256, max_position_embeddings=131072, sliding_window=4096,
    )  # fmt: skip
    if "rope_parameters" not in hf:
        hf = defaults(hf, rope_theta=1e6, rope_local_base_freq=1e4)
    spec = gemma2(hf)
    local = Rope.from_hf(hf, hf.head_dim, "sliding_attention")
    if "rope_local_base_freq" in hf:
        local = Rope(theta=float(hf.rope_local_base_freq), rotary_dim=hf.head_dim)
    qk_norm = RMSNorm(hf.rms_norm_eps, weight_offset=1.0)
    spec = spec.with_attention(qk_norm=qk_norm, soft_cap=0.0)  # which Gemma 3 has in its config only
    return with_layers(spec, sliding_layers(hf, every=2), rope=local)
