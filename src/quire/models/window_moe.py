"""Mixtures whose layers with a window differ from the others: MiMo-V2-Flash, Laguna, Flint; Step-3.5 and 3.7 Flash, whose last
layers limit what activations give."""

import dataclasses
import math
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict, is_sequence
from quire.kernels.types import ClampedSwiglu, Routing
from quire.models.llama import llama
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_experts
from quire.models.patterns import defaults, full_where_not_sliding, kinds_of
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE
from quire.models.variants import NarrowValues

SLIDING, FULL = "sliding_attention", "full_attention"
MIMO_ROTATIONS = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
    for kind, theta in ((FULL, 5e6), (SLIDING, 1e4))
}
MIMO_NAMES = dataclasses.replace(
    EXPERT_NAMES.but(sinks="self_attn.attention_sink_bias"), ignored=(*EXPERT_NAMES.ignored, "*mtp.*")
)


@register("MiMoV2FlashForCausalLM")
def mimo_v2_flash(hf: HFConfig) -> DecoderSpec:
    """MiMo-V2-Flash."""
    hf = defaults(
        hf,
        head_dim=192,
        v_head_dim=128,
        sliding_window=129,
        rope_parameters=MIMO_ROTATIONS,
        hidden_act="silu",
        attention_value_scale=None if "attention_value_scale" in hf else 0.707,
        routed_scaling_factor=1.0,
    )
    if hf.get("sliding_window_size") is not None:
        hf = HFConfig(hf.to_dict() | {"sliding_window": hf.sliding_window_size + 1})
    layers = range(hf.num_hidden_layers)
    kinds = kinds_of(hf, SLIDING, FULL) or [FULL if n == 0 or (n + 1) % 6 == 0 else SLIDING for n in layers]
    mlps = hf.get("mlp_layer_types") or ["dense", *("sparse" for _ in layers[1:])]
    dense = llama(HFConfig(hf.to_dict() | {"mlp_bias": False}))
    dense = dataclasses.replace(dense, mixer=tuple(_mimo_attention(hf, kind) for kind in kinds))
    return with_experts(dense, deepseek_mixture(hf), lambda layer: mlps[layer] == "sparse", MIMO_NAMES)


def _mimo_attention(hf: HFConfig, kind: str) -> NarrowValues:
    is_sliding, scale = kind == SLIDING, hf.get("attention_value_scale")
    rotation: dict[str, Any] = dict(hf.to_dict()["rope_parameters"][kind])
    rotation.setdefault("partial_rotary_factor", 0.334)
    values = hf.to_dict() | {"rope_parameters": {kind: rotation}}
    return NarrowValues(
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads * (2 if is_sliding else 1),
        head_dim=hf.head_dim,
        value_dim=hf.v_head_dim,
        rope=Rope.from_hf(HFConfig(values), hf.head_dim, kind),
        window=hf.sliding_window if is_sliding else 0,
        sinks=is_sliding,
        qkv_bias=bool(hf.get("attention_bias", False)),
        out_scale=1.0 if scale is None else float(scale),
    )


LAGUNA_ROTATIONS = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj")
LAGUNA_NAMES = dataclasses.replace(
    EXPERT_NAMES.but(qkv=PROJECTIONS, router_bias="mlp.experts.e_score_correction_bias"),
    unbiased=("g_proj",),
    aliases={
        "mlp.shared_expert.": "mlp.shared_experts.",
        "mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
    },
)


@register("LagunaForCausalLM")
def laguna(hf: HFConfig) -> DecoderSpec:
    """Laguna XS and M.

    Raises:
        ConfigError: a router's weight on inputs, or unknown gates.
    """
    hf = defaults(
        hf,
        head_dim=128,
        num_key_value_heads=8,
        sliding_window=512,
        rope_parameters=LAGUNA_ROTATIONS,
        rms_norm_eps=1e-6,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        hidden_act="silu",
        gating=True,
    )
    if hf.get("moe_apply_router_weight_on_input", False):
        raise ConfigError(
            "moe_apply_router_weight_on_input=True of config.json is not supported in Laguna", setting="model"
        )
    if hf.gating not in (True, "per-head", "per-element"):
        raise ConfigError(
            f"gating={hf.gating!r} of config.json must be true, 'per-head' or 'per-element'", setting="model"
        )
    layers = range(hf.num_hidden_layers)
    kinds = kinds_of(hf, SLIDING, FULL) or [FULL for _ in layers]
    heads = hf.get("num_attention_heads_per_layer") or [hf.num_attention_heads for _ in layers]
    mlps = hf.get("mlp_layer_types") or ["dense", *("sparse" for _ in layers[1:])]
    dense = llama(HFConfig(hf.to_dict() | {"mlp_bias": False}))
    mixers = tuple(_laguna_attention(hf, kind, count) for kind, count in zip(kinds, heads, strict=True))
    return with_experts(
        dataclasses.replace(dense, mixer=mixers),
        _laguna_mixture(hf),
        lambda layer: mlps[layer] == "sparse",
        LAGUNA_NAMES,
    )


def _laguna_mixture(hf: HFConfig) -> MoE:
    return MoE(
        Routing(
            hf.num_experts,
            hf.num_experts_per_tok,
            scoring="sigmoid",
            scale=float(hf.get("moe_routed_scaling_factor", 1.0)),
            cap=float(hf.get("moe_router_logit_softcapping", 0.0)),
        ),
        hf.moe_intermediate_size,
        hf.hidden_act,
        bias_correction=True,
        shared=GatedMLP(hf.shared_expert_intermediate_size, hf.hidden_act),
    )


def _laguna_attention(hf: HFConfig, kind: str, heads: int) -> Attention:
    bias = bool(hf.get("attention_bias", False))
    return Attention(
        heads=heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        rope=Rope.from_hf(hf, hf.head_dim, kind),
        window=hf.sliding_window if kind == SLIDING else 0,
        qk_norm=RMSNorm(hf.rms_norm_eps),
        qkv_bias=bias,
        out_bias=bias,
        output_gate=True,
        gate_span="value" if hf.gating == "per-element" else "head",
        gate_kind="softplus",
    )


FLINT_NAMES = EXPERT_NAMES.but(
    sinks="self_attn.softmax_offset",
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)


@register("FlintForCausalLM")
def flint(hf: HFConfig) -> DecoderSpec:
    """Flint."""
    layers = range(hf.num_hidden_layers)
    full = [layer < 2 or layer % 4 == 1 or layer == hf.num_hidden_layers - 1 for layer in layers]
    hf = defaults(
        hf,
        head_dim=128,
        sliding_window=513,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=1024,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        mlp_only_layers=[0, 1],
        decoder_sparse_step=1,
        layer_types=["full_attention" if is_full else "sliding_attention" for is_full in full],
    )
    spec = llama(HFConfig(hf.to_dict() | {"mlp_bias": False}))
    spec = spec.with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), sinks=True)
    spec = full_where_not_sliding(spec, hf, rope=None)
    routing = Routing(
        hf.num_experts,
        hf.num_experts_per_tok,
        scoring="sigmoid",
        renormalize=bool(hf.get("norm_topk_prob", True)),
    )
    shared = GatedMLP(hf.shared_expert_intermediate_size, hf.hidden_act)
    mixture = MoE(routing, hf.moe_intermediate_size, hf.hidden_act, shared=shared)

    def has_experts(layer: int) -> bool:
        return hf.num_experts > 0 and layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0

    return with_experts(spec, mixture, has_experts, FLINT_NAMES)


STEP_NAMES = dataclasses.replace(
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
STEP_OTHER_NAMES = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}
"""What published configs call a field."""
STEP_LEFT_OUT = {
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
STEP_OTHER_PARTS = ("*vit_large_projector.*",)


@register("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
def step3p5(hf: HFConfig) -> DecoderSpec:
    """Step-3.5-Flash, and what Step-3.7-Flash does with text.

    Raises:
        ConfigError: attention without gates, with gates by value or in both directions.
    """
    values = hf.to_dict()
    values |= {
        ours: values[theirs] for ours, theirs in STEP_OTHER_NAMES.items() if theirs in values and ours not in values
    }
    for name, needed in (("gating", (True, "per-head")), ("use_bidirectional_attention", (False, None))):
        if name in values and values[name] not in needed:
            raise ConfigError(f"{name}={values[name]!r} of config.json is not supported in Step-3.5", setting="model")
    hf, norm = defaults(HFConfig(values), **STEP_LEFT_OUT), RMSNorm(values.get("rms_norm_eps", 1e-5), weight_offset=1.0)
    layers = range(hf.num_hidden_layers)
    kinds = kinds_of(hf, SLIDING, FULL) or [FULL for _ in layers]
    guessing = range(len(layers), len(layers) + (hf.get("num_nextn_predict_layers") or 0))
    ignored = (*STEP_NAMES.ignored, *STEP_OTHER_PARTS, *(f"*layers.{layer}.*" for layer in guessing))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=len(layers),
        mixer=tuple(_step_attention(hf, kinds, layer, norm) for layer in layers),
        mlp=tuple(
            _step_mixture(hf, layer) if sparse else _step_dense(hf, layer, hf.intermediate_size)
            for layer, sparse in enumerate(_sparse_layers(hf))
        ),
        norm=norm,
        weights=dataclasses.replace(STEP_NAMES, ignored=ignored),
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


def _step_attention(hf: HFConfig, kinds: list[str], layer: int, norm: RMSNorm) -> Attention:
    values, slides = hf.to_dict(), kinds[layer] == SLIDING
    own: dict[str, Any] = values.get("attention_other_setting") or {}
    heads = hf.get("num_sliding_attention_heads") or own.get("num_attention_heads") or hf.num_attention_heads
    scalar = hf.get("query_pre_attn_scalar") or hf.head_dim
    bias = bool(hf.get("attention_bias", False))
    return Attention(
        heads=heads if slides else hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        rope=Rope.from_hf(HFConfig({"rope_parameters": _step_rotation(values, kinds, layer)}), hf.head_dim),
        window=(hf.get("sliding_window") or 0) if slides else 0,
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
        scale=float(scalar) ** -0.5,
        output_gate=True,
        gate_span="head",
    )


def _step_rotation(values: dict[str, Any], kinds: list[str], layer: int) -> dict[str, Any]:
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


def _step_limit(hf: HFConfig, name: str, layer: int) -> float:
    """A layer's; 0: none."""
    limits = hf.get(name)
    return float(limits[layer] or 0.0) if limits else 0.0


def _step_dense(hf: HFConfig, layer: int, size: int) -> GatedMLP:
    limit = _step_limit(hf, "swiglu_limits_shared", layer)
    gate_limit = before_silu(limit) if limit else None
    bias = bool(hf.get("mlp_bias", False))
    return GatedMLP(size, "silu", bias=bias, limit=limit, gate_limit=gate_limit)


def _step_mixture(hf: HFConfig, layer: int) -> MoE:
    limit, scale = _step_limit(hf, "swiglu_limits", layer), float(hf.moe_router_scaling_factor)
    return MoE(
        Routing(hf.n_routed_experts, hf.num_experts_per_tok, scoring="sigmoid", scale=scale),
        hf.moe_intermediate_size,
        "silu",
        bias_correction=True,
        clamp=ClampedSwiglu(1.0, limit, offset=0, gate_limit=before_silu(limit)) if limit else None,
        shared=_step_dense(hf, layer, hf.share_expert_dim),
    )


def before_silu(limit: float) -> float:
    """The gate whose SiLU is the limit (above 0): SiLU never falls beyond it, so that gates may be limited instead of it."""
    low, high = limit, limit + 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if middle / (1.0 + math.exp(-middle)) > limit else (middle, high)
    return high
