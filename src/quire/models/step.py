"""Step-3.5 and 3.7 Flash: a mixture whose layers with a window have heads of their own number, and whose last layers limit what
activations give."""

import dataclasses
import math
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict, is_sequence
from quire.kernels.types import ClampedSwiglu, Routing
from quire.models.mixtures import EXPERT_NAMES
from quire.models.patterns import defaults, kinds_of
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE

FULL, SLIDING = "full_attention", "sliding_attention"
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj")
NAMES = dataclasses.replace(
    EXPERT_NAMES.but(
        drop=("experts_gate_up", "experts_down"),
        qkv=PROJECTIONS,
        router="moe.gate",
        router_bias="moe.router_bias",
        shared_gate_up=("share_expert.gate_proj", "share_expert.up_proj"),
        shared_down="share_expert.down_proj",
    ),
    stacked={
        "experts_gate_up": ("moe.gate_proj.weight", "moe.up_proj.weight"),
        "experts_down": "moe.down_proj.weight",
    },
    unbiased=("g_proj",),
)
OTHER_NAMES = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}
"""What published configs call a field."""
LEFT_OUT = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
"""What config.json need not say."""
OTHER_PARTS = ("*vit_large_projector.*",)


@register("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
def step3p5(hf: HFConfig) -> DecoderSpec:
    """Step-3.5-Flash, and what Step-3.7-Flash does with text.

    Raises:
        ConfigError: attention without gates, with gates by value or in both directions.
    """
    values = hf.to_dict()
    values |= {ours: values[theirs] for ours, theirs in OTHER_NAMES.items() if theirs in values and ours not in values}
    for name, needed in (("gating", (True, "per-head")), ("use_bidirectional_attention", (False, None))):
        if name in values and values[name] not in needed:
            raise ConfigError(f"{name}={values[name]!r} of config.json is not supported in Step-3.5", setting="model")
    hf, norm = defaults(HFConfig(values), **LEFT_OUT), RMSNorm(values.get("rms_norm_eps", 1e-5), weight_offset=1.0)
    layers = range(hf.num_hidden_layers)
    kinds = kinds_of(hf, SLIDING, FULL) or [FULL for _ in layers]
    guessing = range(len(layers), len(layers) + (hf.get("num_nextn_predict_layers") or 0))
    ignored = (*NAMES.ignored, *OTHER_PARTS, *(f"*layers.{layer}.*" for layer in guessing))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=len(layers),
        mixer=tuple(_attention(hf, kinds, layer, norm) for layer in layers),
        mlp=tuple(
            _mixture(hf, layer) if sparse else _dense(hf, layer, hf.intermediate_size)
            for layer, sparse in enumerate(_sparse_layers(hf))
        ),
        norm=norm,
        weights=dataclasses.replace(NAMES, ignored=ignored),
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def _sparse_layers(hf: HFConfig) -> list[bool]:
    layers, named = range(hf.num_hidden_layers), hf.to_dict().get("moe_layers_enum")
    if kinds := hf.get("mlp_layer_types"):
        return [kind == "sparse" for kind in kinds]
    if named is None:
        return [layer >= 3 for layer in layers]
    parts = named.split(",") if isinstance(named, str) else named
    chosen = {int(part) for part in parts if str(part).strip()}
    return [layer in chosen for layer in layers]


def _attention(hf: HFConfig, kinds: list[str], layer: int, norm: RMSNorm) -> Attention:
    values, slides = hf.to_dict(), kinds[layer] == SLIDING
    own: dict[str, Any] = values.get("attention_other_setting") or {}
    heads = hf.get("num_sliding_attention_heads") or own.get("num_attention_heads") or hf.num_attention_heads
    scalar = hf.get("query_pre_attn_scalar") or hf.head_dim
    bias = bool(hf.get("attention_bias", False))
    return Attention(
        heads=heads if slides else hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        rope=Rope.from_hf(HFConfig({"rope_parameters": _rotation(values, kinds, layer)}), hf.head_dim),
        window=(hf.get("sliding_window") or 0) if slides else 0,
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
        scale=float(scalar) ** -0.5,
        output_gate=True,
        gate_span="head",
    )


def _rotation(values: dict[str, Any], kinds: list[str], layer: int) -> dict[str, Any]:
    """By kind of layer; or a list of bases and shares, of which a kind's first layer tells those of all. Only full attention is
    stretched."""
    given, kind = values.get("rope_parameters") or {}, kinds[layer]
    if is_dict(given.get(kind)):
        return dict(given[kind])
    first, bases, shares = kinds.index(kind), values["rope_theta"], values.get("partial_rotary_factors")
    base = bases[first] if is_sequence(bases) else bases
    parameters = {"rope_type": "default", "rope_theta": base}
    if shares:
        parameters["partial_rotary_factor"] = shares[first]
    stretched: dict[str, Any] = values.get("rope_scaling") or {}
    return parameters | (stretched if kind == FULL else {})


def _limit(hf: HFConfig, name: str, layer: int) -> float:
    """A layer's; 0: none."""
    limits = hf.get(name)
    return float(limits[layer] or 0.0) if limits else 0.0


def _dense(hf: HFConfig, layer: int, size: int) -> GatedMLP:
    limit = _limit(hf, "swiglu_limits_shared", layer)
    gate_limit = before_silu(limit) if limit else None
    bias = bool(hf.get("mlp_bias", False))
    return GatedMLP(size, "silu", bias=bias, limit=limit, gate_limit=gate_limit)


def _mixture(hf: HFConfig, layer: int) -> MoE:
    limit, scale = _limit(hf, "swiglu_limits", layer), float(hf.moe_router_scaling_factor)
    return MoE(
        Routing(hf.n_routed_experts, hf.num_experts_per_tok, scoring="sigmoid", scale=scale),
        hf.moe_intermediate_size,
        "silu",
        bias_correction=True,
        clamp=ClampedSwiglu(1.0, limit, offset=0, gate_limit=before_silu(limit)) if limit else None,
        shared=_dense(hf, layer, hf.share_expert_dim),
    )


def before_silu(limit: float) -> float:
    """The gate whose SiLU is the limit (above 0): SiLU never falls beyond it, so that gates may be limited instead of it."""
    low, high = limit, limit + 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if middle / (1.0 + math.exp(-middle)) > limit else (middle, high)
    return high
