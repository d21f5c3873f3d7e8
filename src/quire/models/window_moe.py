"""Mixtures whose layers with a window differ from the others: MiMo-V2-Flash, Laguna, Flint."""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import Routing
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
