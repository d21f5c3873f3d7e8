"""Mixtral: Mistral with a mixture of experts in every layer."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.experts import Routing
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.registry import register
from quire.models.spec import DecoderSpec, MoE

MIXTRAL_NAMES = LLAMA_NAMES.but(
    router="block_sparse_moe.gate",
    experts_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    experts_down="block_sparse_moe.experts.{expert}.w2",
)


@register("MixtralForCausalLM")
def mixtral(hf: HFConfig) -> DecoderSpec:
    """Mixtral 8x7B and 8x22B."""
    mixture = MoE(Routing(hf.num_local_experts, hf.num_experts_per_tok), hf.intermediate_size, hf.hidden_act)
    return dataclasses.replace(llama(hf), mlp=mixture, weights=MIXTRAL_NAMES)
