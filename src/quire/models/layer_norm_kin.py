"""Llama's plan with layer norms: StableLM, Orion, Nemotron, Jais 2, Persimmon."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, UNGATED_NAMES, llama
from quire.models.patterns import defaults, layer_norm_of
from quire.models.registry import register
from quire.models.residual import PARALLEL, PRE, LayerNorm
from quire.models.spec import MLP, DecoderSpec

STABLELM_NAMES = LLAMA_NAMES.but(
    q_norm="self_attn.q_layernorm.norms.{head}", k_norm="self_attn.k_layernorm.norms.{head}"
)
PERSIMMON_NAMES = dataclasses.replace(
    UNGATED_NAMES.but(
        qkv="self_attn.query_key_value",
        out="self_attn.dense",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        final_norm="final_layernorm",
    ),
    by_head=("qkv",),
)


@register("StableLmForCausalLM", "StableLMEpochForCausalLM")
def stablelm(hf: HFConfig) -> DecoderSpec:
    """StableLM: a part of each head rotates; 2 (12B) norms each head by its own weights and has its halves in parallel."""
    hf = defaults(hf, partial_rotary_factor=hf.get("rope_pct", 0.25))
    norm = LayerNorm(layer_norm_of(hf).eps, bias=False) if hf.get("qk_layernorm", False) else None
    spec = llama(hf).with_attention(
        qkv_bias=bool(hf.get("use_qkv_bias", False)), out_bias=False, qk_norm=norm, qk_norm_span="heads"
    )
    is_parallel = bool(hf.get("use_parallel_residual", False))
    placement = PARALLEL if is_parallel else PRE
    return dataclasses.replace(spec, norm=layer_norm_of(hf), placement=placement, weights=STABLELM_NAMES)


@register("OrionForCausalLM")
def orion(hf: HFConfig) -> DecoderSpec:
    """Orion."""
    return dataclasses.replace(llama(hf), norm=layer_norm_of(hf))


@register("NemotronForCausalLM")
def nemotron(hf: HFConfig) -> DecoderSpec:
    """Nemotron 3 and 4, Minitron: norm weights stored minus one, squared ReLUs."""
    spec = llama(defaults(hf, partial_rotary_factor=hf.get("rope_percent", 0.5)))
    mlp = MLP(hf.intermediate_size, hf.get("hidden_act", "relu2"), bias=bool(hf.get("mlp_bias", False)))
    norm = LayerNorm(layer_norm_of(hf).eps, weight_offset=1.0)
    return dataclasses.replace(spec, mlp=mlp, norm=norm, weights=UNGATED_NAMES)


@register("Jais2ForCausalLM")
def jais2(hf: HFConfig) -> DecoderSpec:
    """Jais 2: biases everywhere, squared ReLUs."""
    hf = defaults(hf, attention_bias=True, mlp_bias=True, hidden_act="relu2")
    mlp = MLP(hf.intermediate_size, hf.hidden_act, bias=bool(hf.mlp_bias))
    return dataclasses.replace(llama(hf), mlp=mlp, norm=layer_norm_of(hf), weights=UNGATED_NAMES)


@register("PersimmonForCausalLM")
def persimmon(hf: HFConfig) -> DecoderSpec:
    """Persimmon: a layer norm of each head, half of which rotates; q, k and v stored head by head."""
    hf, norm = defaults(hf, partial_rotary_factor=0.5, hidden_act="relu2"), layer_norm_of(hf)
    qk_norm = norm if hf.get("qk_layernorm", True) else None
    spec = llama(hf).with_attention(qk_norm=qk_norm, kv_heads=hf.num_attention_heads, qkv_bias=True, out_bias=True)
    mlp = MLP(hf.intermediate_size, hf.hidden_act, bias=True)
    return dataclasses.replace(spec, mlp=mlp, norm=norm, weights=PERSIMMON_NAMES)
