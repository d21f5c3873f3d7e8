"""Granite with a mixture of experts in every layer, and beside it a feed-forward that every token takes (shared)."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.granite import granite, granite_swa
from quire.models.llama import LLAMA_NAMES
from quire.models.registry import register
from quire.models.spec import DecoderSpec, GatedMLP, MoE

GRANITE_MOE_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        router="block_sparse_moe.router.layer",
        shared_gate_up="shared_mlp.input_linear",
        shared_down="shared_mlp.output_linear",
    ),
    stacked={
        "experts_gate_up": "block_sparse_moe.input_linear.weight",
        "experts_down": "block_sparse_moe.output_linear.weight",
    },
)
GRANITE_MOE_SWA_NAMES = dataclasses.replace(
    GRANITE_MOE_NAMES.but(sinks="self_attn.sinks", router="block_sparse_moe.router"),
    stacked={
        "experts_gate_up": "block_sparse_moe.experts.gate_up_proj",
        "experts_down": "block_sparse_moe.experts.down_proj",
    },
)


def granite_mixture(hf: HFConfig) -> MoE:
    """Softmax over the chosen experts' logits; `shared_intermediate_size` is missing or 0 where nothing is shared."""
    routing, shared = Routing(hf.num_local_experts, hf.num_experts_per_tok), hf.get("shared_intermediate_size", 0)
    return MoE(routing, hf.intermediate_size, hf.hidden_act, shared=GatedMLP(shared, hf.hidden_act) if shared else None)


@register("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
def granite_moe(hf: HFConfig) -> DecoderSpec:
    """Granite 3 MoE (1B-A400M, 3B-A800M), and those with a shared feed-forward."""
    return dataclasses.replace(granite(hf), mlp=granite_mixture(hf), weights=GRANITE_MOE_NAMES)


@register("GraniteMoeSWAForCausalLM")
def granite_moe_swa(hf: HFConfig) -> DecoderSpec:
    """Granite with windows and sinks, and experts."""
    return dataclasses.replace(granite_swa(hf), mlp=granite_mixture(hf), weights=GRANITE_MOE_SWA_NAMES)
