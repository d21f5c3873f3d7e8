"""Llama-like attention with experts in every layer: OLMoE, HunYuan."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.experts import Routing
from quire.models.llama import llama
from quire.models.mixtures import EXPERT_NAMES
from quire.models.registry import register
from quire.models.spec import DecoderSpec, GatedMLP, MoE, RMSNorm

HUNYUAN_NAMES = EXPERT_NAMES.but(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)


@register("OlmoeForCausalLM")
def olmoe(hf: HFConfig) -> DecoderSpec:
    """OLMoE: norms over all query and all key heads at once; queries, keys and values may be clipped."""
    attention = llama(hf).with_attention(
        qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_span="all", clip_qkv=float(hf.get("clip_qkv", 0.0)), window=0
    )
    routing = Routing(hf.num_experts, hf.num_experts_per_tok, renormalize=bool(hf.get("norm_topk_prob", False)))
    return dataclasses.replace(attention, mlp=MoE(routing, hf.intermediate_size, hf.hidden_act), weights=EXPERT_NAMES)


@register("HunYuanMoEV1ForCausalLM")
def hunyuan_moe(hf: HFConfig) -> DecoderSpec:
    """HunYuan-A13B: norms of heads after rotation, and a shared expert of the same size as each."""
    dense = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_after_rope=True)
    experts, top_k = (_of_layers(value, dense.layers) for value in (hf.num_experts, hf.moe_topk))
    mlps = tuple(
        MoE(
            Routing(count, chosen),
            hf.intermediate_size,
            hf.hidden_act,
            shared=GatedMLP(hf.intermediate_size, hf.hidden_act),
        )
        for count, chosen in zip(experts, top_k, strict=True)
    )
    return dataclasses.replace(dense, mlp=mlps, weights=HUNYUAN_NAMES)


def _of_layers(value: int | list[int], layers: int) -> list[int]:
    return value if isinstance(value, list) else [value] * layers
