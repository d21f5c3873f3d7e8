"""MiMo-V2-Flash: values narrower than keys, windows with sinks and twice the KV heads, experts in all but the first layer."""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.models.llama import llama
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_experts
from quire.models.patterns import defaults, kinds_of
from quire.models.registry import register
from quire.models.rope import Rope
from quire.models.spec import DecoderSpec
from quire.models.variants import NarrowValues

SLIDING, FULL = "sliding_attention", "full_attention"
ROTATIONS = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
    for kind, theta in ((FULL, 5e6), (SLIDING, 1e4))
}
NAMES = dataclasses.replace(
    EXPERT_NAMES.but(sinks="self_attn.attention_sink_bias"), ignored=(*EXPERT_NAMES.ignored, "*mtp.*")
)


@register("MiMoV2FlashForCausalLM")
def mimo_v2_flash(hf: HFConfig) -> DecoderSpec:
    """MiMo-V2-Flash."""
    hf = defaults(
        hf, head_dim=192, v_head_dim=128, sliding_window=129, rope_parameters=ROTATIONS, hidden_act="silu",
        attention_value_scale=None if "attention_value_scale" in hf else 0.707, routed_scaling_factor=1.0,
    )  # fmt: skip
    if hf.get("sliding_window_size") is not None:
        hf = HFConfig(hf.to_dict() | {"sliding_window": hf.sliding_window_size + 1})
    layers = range(hf.num_hidden_layers)
    kinds = kinds_of(hf, SLIDING, FULL) or [FULL if n == 0 or (n + 1) % 6 == 0 else SLIDING for n in layers]
    mlps = hf.get("mlp_layer_types") or ["dense", *("sparse" for _ in layers[1:])]
    dense = llama(HFConfig(hf.to_dict() | {"mlp_bias": False}))
    dense = dataclasses.replace(dense, mixer=tuple(_attention(hf, kind) for kind in kinds))
    return with_experts(dense, deepseek_mixture(hf), lambda layer: mlps[layer] == "sparse", NAMES)


def _attention(hf: HFConfig, kind: str) -> NarrowValues:
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
