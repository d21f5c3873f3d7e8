"""Phi-1 to 2 (both halves in parallel, LayerNorm, partial rotation) and Phi-3 to 4 (Llama's plan, fused matrices, longrope)."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.registry import register
from quire.models.rope import Rope
from quire.models.spec import MLP, PARALLEL, Attention, DecoderSpec, LayerNorm

PHI_NAMES = LLAMA_NAMES.but(
    drop=("gate_up", "before_mlp"), out="self_attn.dense", up="mlp.fc1", down="mlp.fc2", final_norm="final_layernorm"
)
PHI3_NAMES = LLAMA_NAMES.but(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


@register("PhiForCausalLM")
def phi(hf: HFConfig) -> DecoderSpec:
    """Phi-1, Phi-1.5, Phi-2."""
    if hf.get("qk_layernorm", False):
        raise ConfigError("qk_layernorm=true of config.json is not supported for Phi", setting="model")
    head_dim = hf.hidden_size // hf.num_attention_heads
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(
            heads=hf.num_attention_heads,
            kv_heads=hf.get("num_key_value_heads", hf.num_attention_heads),
            head_dim=head_dim,
            rope=Rope.from_hf(hf, head_dim),
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MLP(hf.intermediate_size, act=hf.hidden_act, bias=True),
        norm=LayerNorm(hf.layer_norm_eps),
        placement=PARALLEL,
        weights=PHI_NAMES,
        max_positions=hf.max_position_embeddings,
        lm_head_bias=True,
    )


@register("Phi3ForCausalLM")
def phi3(hf: HFConfig) -> DecoderSpec:
    """Phi-3, Phi-3.5, Phi-4 (dense)."""
    return dataclasses.replace(llama(hf), weights=PHI3_NAMES)
