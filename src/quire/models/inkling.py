"""Inkling: attention by distance in place of rotation, short convolutions, and shared experts that a router weighs."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES
from quire.models.patterns import defaults, kinds_of
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import DecoderSpec, GatedMLP, MoE, Temperature, WeightNames
from quire.models.variants import RelativeAttention

FULL, SLIDING = "hybrid", "hybrid_sliding"
PADDED = ("embedding", "lm_head")
NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        embedding_norm="embed_tokens.embed_norm",
        qkv=("self_attn.q_proj", "self_attn.r_proj", "self_attn.k_proj", "self_attn.v_proj"),
        kv_conv=("self_attn.k_sconv.conv1d.weight", "self_attn.v_sconv.conv1d.weight"),
        relative="self_attn.rel_logits_proj.proj",
        out_conv="attn_sconv.conv1d.weight",
        mlp_conv="mlp_sconv.conv1d.weight",
        mlp_scale="mlp.global_scale",
        router="mlp.gate",
        router_bias="mlp.gate.e_score_correction_bias",
        experts_scale="mlp.gate.global_scale",
    ),
    stacked={
        "experts_gate_up": "mlp.experts.gate_up_proj",
        "experts_down": "mlp.experts.down_proj",
        "always_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "always_down": "mlp.shared_experts.down_proj",
    },
    padded=PADDED,
    ignored=(*LLAMA_NAMES.ignored, "*mtp.*"),
)
"""As Transformers has the language model alone."""
PUBLISHED_NAMES = WeightNames(
    modules={
        "embedding": "embed",
        "embedding_norm": "embed_norm",
        "qkv": ("attn.wq_du", "attn.wr_du", "attn.wk_dv", "attn.wv_dv"),
        "kv_conv": ("attn.k_sconv.weight", "attn.v_sconv.weight"),
        "q_norm": "attn.q_norm",
        "k_norm": "attn.k_norm",
        "relative": "attn.rel_logits_proj.proj",
        "out": "attn.wo_ud",
        "out_conv": "attn_sconv.weight",
        "gate_up": "mlp.w13_dn",
        "down": "mlp.w2_md",
        "mlp_scale": "mlp.global_scale",
        "mlp_conv": "mlp_sconv.weight",
        "router": "mlp.gate",
        "router_bias": "mlp.gate.bias",
        "experts_scale": "mlp.gate.global_scale",
        "before_mixer": "attn_norm",
        "before_mlp": "mlp_norm",
        "final_norm": "norm",
        "lm_head": "model.llm.unembed",
    },
    prefixes=("model.llm.",),
    stacked={
        "experts_gate_up": "mlp.experts.w13_weight",
        "experts_down": "mlp.experts.w2_weight",
        "always_gate_up": "mlp.shared_experts.shared_w13_weight",
        "always_down": "mlp.shared_experts.shared_w2_weight",
    },
    interleaved=("gate_up", "experts_gate_up", "always_gate_up"),
    padded=PADDED,
    ignored=("*.inv_freq", "*mtp.*", "model.audio.*", "model.visual.*"),
)
"""As the checkpoints of the whole model have them."""
LEFT_OUT = {
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_alpha": 0.1,
    "conv_kernel_size": 4,
    "hidden_act": "silu",
    "moe_intermediate_size": 3072,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "route_scale": 8.0,
    "logits_mup_width_multiplier": 24.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
}
"""What config.json need not say."""
OTHER_NAMES = {
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
    "sliding_window_size": "sliding_window",
    "logits_mup_width_multiplier": "embedding_multiplier",
    "n_routed_experts": "num_local_experts",
}
"""What some configs call a field."""


@register("InklingForCausalLM")
def inkling_text(hf: HFConfig) -> DecoderSpec:
    """Inkling's language model by itself."""
    return _inkling(hf, NAMES)


@register("InklingForConditionalGeneration")
def inkling(hf: HFConfig) -> DecoderSpec:
    """What Inkling does with text."""
    return _inkling(hf, PUBLISHED_NAMES)


def _inkling(hf: HFConfig, names: WeightNames) -> DecoderSpec:
    values = hf.to_dict()
    values |= {ours: values[theirs] for ours, theirs in OTHER_NAMES.items() if theirs in values and ours not in values}
    if values.get("dense_intermediate_size"):  # then the other field is the size of an expert
        sizes = {"moe_intermediate_size": hf.intermediate_size, "intermediate_size": hf.dense_intermediate_size}
        values |= sizes
    hf, norm = defaults(HFConfig(values), **LEFT_OUT), RMSNorm(values.get("rms_norm_eps", 1e-6))
    if not hf.get("shared_expert_sink", True):
        raise ConfigError("shared_expert_sink=False of config.json is not supported in Inkling", setting="model")
    layers, local = range(hf.num_hidden_layers), hf.get("local_layer_ids")
    slides = [(layer + 1) % 6 > 0 if local is None else layer in local for layer in layers]
    kinds = kinds_of(hf, SLIDING, FULL) or [SLIDING if is_local else FULL for is_local in slides]
    first = hf.get("dense_mlp_idx", 0)
    mlps = hf.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in layers]
    dense = GatedMLP(hf.intermediate_size, hf.hidden_act, learned_scale=True)
    return DecoderSpec(
        vocab=min(hf.get("unpadded_vocab_size") or hf.vocab_size, hf.vocab_size),
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(_attention(hf, kind == SLIDING, norm) for kind in kinds),
        mlp=tuple(dense if kind == "dense" else _mixture(hf) for kind in mlps),
        norm=norm,
        weights=names,
        max_positions=hf.max_position_embeddings,
        embedding_norm=norm,
        logits_scale=1.0 / hf.logits_mup_width_multiplier,
    )


def _attention(hf: HFConfig, slides: bool, norm: RMSNorm) -> RelativeAttention:
    floor, size = hf.get("log_scaling_n_floor"), hf.swa_head_dim if slides else hf.head_dim
    growth = None if slides or not floor else Temperature(float(hf.log_scaling_alpha), int(floor), 1, steps=False)
    return RelativeAttention(
        heads=hf.swa_num_attention_heads if slides else hf.num_attention_heads,
        kv_heads=hf.swa_num_key_value_heads if slides else hf.num_key_value_heads,
        head_dim=size,
        window=hf.sliding_window_size if slides else 0,
        qk_norm=norm,
        scale=1.0 / size,
        temperature=growth,
        profiles=hf.d_rel,
        extent=hf.sliding_window_size if slides else hf.rel_extent,
        conv=hf.conv_kernel_size,
    )


def _mixture(hf: HFConfig) -> MoE:
    shared = hf.n_shared_experts
    routing = Routing(
        hf.n_routed_experts + shared, hf.num_experts_per_tok + shared, scoring="sigmoid", scale=float(hf.route_scale)
    )
    size = hf.moe_intermediate_size
    return MoE(routing, size, hf.hidden_act, bias_correction=True, learned_scale=True, always=shared)
