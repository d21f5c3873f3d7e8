"""Phi-1 to 2 (both halves in parallel, LayerNorm, partial rotation) and Phi-3 to 4 (Llama's plan, fused matrices, longrope)."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, llama, mistral
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.residual import PARALLEL, LayerNorm
from quire.models.spec import MLP, DecoderSpec

PHI_NAMES = LLAMA_NAMES.but(
    drop=("gate_up", "before_mlp"),
    out="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up="mlp.fc1",
    down="mlp.fc2",
    final_norm="final_layernorm",
    lm_head_bias="lm_head.bias",
)
PHI3_NAMES = LLAMA_NAMES.but(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


@register("PhiForCausalLM")
def phi(hf: HFConfig) -> DecoderSpec:
    """Phi-1, Phi-1.5, Phi-2."""
    norm = LayerNorm(hf.layer_norm_eps)
    spec = llama(defaults(hf, partial_rotary_factor=0.5)).with_attention(qkv_bias=True, out_bias=True)
    return dataclasses.replace(
        spec.with_attention(qk_norm=norm if hf.get("qk_layernorm", False) else None),
        mlp=MLP(hf.intermediate_size, act=hf.hidden_act, bias=True),
        norm=norm,
        placement=PARALLEL,
        weights=PHI_NAMES,
        lm_head_bias=True,
    )


@register("Phi3ForCausalLM")
def phi3(hf: HFConfig) -> DecoderSpec:
    """Phi-3, Phi-3.5, Phi-4 (dense)."""
    return dataclasses.replace(mistral(hf), weights=PHI3_NAMES)
