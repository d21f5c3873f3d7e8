"""Laguna: attention with a softplus gate and its own number of heads a layer, windows that rotate otherwise, experts."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import Routing
from quire.models.llama import llama
from quire.models.mixtures import EXPERT_NAMES, with_experts
from quire.models.patterns import defaults, kinds_of
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE

SLIDING, FULL = "sliding_attention", "full_attention"
ROTATIONS = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj")
NAMES = dataclasses.replace(
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
        hf, head_dim=128, num_key_value_heads=8, sliding_window=512, rope_parameters=ROTATIONS, rms_norm_eps=1e-6,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, hidden_act="silu", gating=True,
    )  # fmt: skip
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
    mixture = MoE(
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
    dense = llama(HFConfig(hf.to_dict() | {"mlp_bias": False}))
    mixers = tuple(_attention(hf, kind, count) for kind, count in zip(kinds, heads, strict=True))
    return with_experts(dataclasses.replace(dense, mixer=mixers), mixture, lambda layer: mlps[layer] == "sparse", NAMES)


def _attention(hf: HFConfig, kind: str, heads: int) -> Attention:
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
