"""Jamba: mostly Mamba layers with norms on their time steps, some of attention without positions; every other feed-forward is a
mixture of experts."""

import dataclasses
import math

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.mamba import check_silu, ssm_names
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import DecoderSpec, GatedMLP, Mamba, MoE

JAMBA_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        (),
        **ssm_names("mamba."),
        before_mlp="pre_ff_layernorm",
        final_norm="final_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        experts_gate_up=("feed_forward.experts.{expert}.gate_proj", "feed_forward.experts.{expert}.up_proj"),
        experts_down="feed_forward.experts.{expert}.down_proj",
    ),
    stacked={"experts_gate_up": "feed_forward.experts.gate_up_proj", "experts_down": "feed_forward.experts.down_proj"},
)


@register("JambaForCausalLM")
def jamba(hf: HFConfig) -> DecoderSpec:
    """Jamba 1 and 1.5."""
    check_silu(hf)
    spec, layers = llama(hf), range(hf.num_hidden_layers)
    (attention, *_) = spec.attentions()
    rank = hf.get("mamba_dt_rank", "auto")
    mamba = Mamba(
        channels=hf.mamba_expand * hf.hidden_size,
        state=hf.mamba_d_state,
        dt_rank=math.ceil(hf.hidden_size / 16) if rank == "auto" else int(rank),
        conv=hf.get("mamba_d_conv", 4),
        bias=bool(hf.get("mamba_proj_bias", False)),
        conv_bias=bool(hf.get("mamba_conv_bias", True)),
        norm=RMSNorm(hf.rms_norm_eps),
    )
    attention = dataclasses.replace(attention, rope=None)
    dense = GatedMLP(hf.intermediate_size, hf.hidden_act)
    mixture = MoE(
        Routing(hf.num_experts, hf.num_experts_per_tok, renormalize=False), hf.intermediate_size, hf.hidden_act
    )
    has_attention = [layer % hf.attn_layer_period == hf.attn_layer_offset for layer in layers]
    has_experts = [hf.num_experts > 1 and layer % hf.expert_layer_period == hf.expert_layer_offset for layer in layers]
    return dataclasses.replace(
        spec,
        mixer=tuple(attention if yes else mamba for yes in has_attention),
        mlp=tuple(mixture if yes else dense for yes in has_experts),
        weights=JAMBA_NAMES,
    )
