"""Mixtral and what has its weight names: Mistral with a mixture of experts in every layer."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, llama, mistral
from quire.models.registry import register
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import DecoderSpec, MoE

MIXTRAL_NAMES = LLAMA_NAMES.but(
    lm_head_bias="lm_head.bias",
    router="block_sparse_moe.gate",
    router_bias="block_sparse_moe.e_score_correction_bias",
    experts_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    experts_down="block_sparse_moe.experts.{expert}.w2",
)


@register("MixtralForCausalLM")
def mixtral(hf: HFConfig) -> DecoderSpec:
    """Mixtral 8x7B and 8x22B."""
    mixture = MoE(Routing(hf.num_local_experts, hf.num_experts_per_tok), hf.intermediate_size, hf.hidden_act)
    return dataclasses.replace(mistral(hf), mlp=mixture, weights=MIXTRAL_NAMES)


@register("PhimoeForCausalLM", "PhiMoEForCausalLM")
def phimoe(hf: HFConfig) -> DecoderSpec:
    """Phi-3.5-MoE: layer norms, biases, and two experts that are chosen one after the other."""
    routing = Routing(
        hf.num_local_experts, 2, "sparsemixer", renormalize=False, jitter=float(hf.get("router_jitter_noise", 0.01))
    )
    spec = mistral(hf)
    return dataclasses.replace(
        spec.with_attention(rope=_stretched(hf, spec.attentions()[0].rope)),
        mlp=MoE(routing, hf.intermediate_size, hf.hidden_act),
        norm=LayerNorm(hf.rms_norm_eps),
        lm_head_bias=bool(hf.get("lm_head_bias", False)),
        weights=MIXTRAL_NAMES,
    )


def _stretched(hf: HFConfig, rope: Rope | None) -> Rope | None:
    """With the factor on cosines and sines that the config names."""
    section = hf.get("rope_scaling") or hf.get("rope_parameters")
    if rope is None or rope.scaling is None or section.get("long_mscale") is None:
        return rope
    is_long = hf.max_position_embeddings > rope.scaling.original_max_positions
    factor = float(section.long_mscale if is_long else section.short_mscale)
    return dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, attention_factor=factor))


@register("MiniMaxM2ForCausalLM")
def minimax_m2(hf: HFConfig) -> DecoderSpec:
    """MiniMax-M2: norms over all query and all key heads at once, half of each head rotated, a bias on the choice."""
    rotated = hf.get("rotary_dim", hf.head_dim) / hf.head_dim
    spec = llama(HFConfig({"partial_rotary_factor": rotated} | hf.to_dict()))
    routing = Routing(hf.num_local_experts, hf.num_experts_per_tok, "sigmoid")
    return dataclasses.replace(
        spec.with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_span="all"),
        mlp=MoE(routing, hf.intermediate_size, hf.hidden_act, bias_correction=True),
        weights=MIXTRAL_NAMES,
    )
