"""Falcon-H1: attention and Mamba-2 side by side in each layer, with multipliers on nearly everything."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.bamba import BAMBA_NAMES
from quire.models.llama import llama
from quire.models.mamba import mamba2_of
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import DecoderSpec, GatedMLP, SideBySide


@register("FalconH1ForCausalLM")
def falcon_h1(hf: HFConfig) -> DecoderSpec:
    """Falcon-H1. A multiplier on attention's input multiplies queries, keys and values; the score has two of them."""
    spec, groups = llama(hf), hf.get("mamba_n_groups", 1)
    (attention, *_) = spec.attentions()
    before, gate = float(hf.get("attention_in_multiplier", 1.0)), float((hf.get("mlp_multipliers") or (1.0, 1.0))[0])
    attention = dataclasses.replace(
        attention,
        scale=attention.head_dim**-0.5 * before**2 * float(hf.get("key_multiplier", 1.0)),
        out_scale=before * float(hf.get("attention_out_multiplier", 1.0)),
    )
    mamba = mamba2_of(
        hf,
        norm=RMSNorm(hf.rms_norm_eps) if hf.get("mamba_rms_norm", False) else None,
        norm_groups=groups,
        norm_first=bool(hf.get("mamba_norm_before_gate", True)),
        out_bias=bool(hf.get("projectors_bias", False)),
        scales=tuple(float(hf.get("ssm_in_multiplier", 1.0)) * m for m in hf.get("ssm_multipliers") or (1.0,) * 5),
        out_scale=float(hf.get("ssm_out_multiplier", 1.0)),
    )
    # These stand outside of the multipliers that are applied to outputs here, and to inputs by the model.
    biases = {"qkv": 1 / before, "out": 1 / before, "down": gate, "ssm_in": 1 / float(hf.get("ssm_in_multiplier", 1.0))}
    _, down = hf.get("mlp_multipliers") or (1.0, 1.0)
    return dataclasses.replace(
        spec,
        mixer=(SideBySide((attention, mamba)),) * spec.layers,
        mlp=GatedMLP(
            hf.intermediate_size, hf.hidden_act, bool(hf.get("mlp_bias", False)), scale=gate, out_scale=down / gate
        ),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        logits_scale=float(hf.get("lm_head_multiplier", 1.0)),
        weights=dataclasses.replace(BAMBA_NAMES, bias_scales=biases),
    )
