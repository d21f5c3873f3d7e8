"""ERNIE 4.5 with experts: softmax scores with a bias on the choice, in a stretch of the layers."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import Routing
from quire.models.llama import interleaved, llama
from quire.models.mixtures import EXPERT_NAMES, with_experts
from quire.models.registry import register
from quire.models.spec import DecoderSpec, GatedMLP, MoE

ERNIE_MOE_NAMES = dataclasses.replace(
    EXPERT_NAMES.but(lm_head_bias="lm_head.bias", router_bias="mlp.moe_statics.e_score_correction_bias"),
    row_vectors=("router_bias",),
)


@register("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM")
def ernie4_5_moe(hf: HFConfig) -> DecoderSpec:
    """ERNIE-4.5-21B-A3B and ERNIE-4.5-300B-A47B."""
    bias = bool(hf.get("use_bias", False))
    dense = llama(HFConfig({"tie_word_embeddings": True} | hf.to_dict() | {"attention_bias": bias, "mlp_bias": bias}))
    if (least := hf.get("moe_norm_min", 0.0)) > 1e-6:  # no sum of float32 scores comes under that
        raise ConfigError(f"moe_norm_min={least} of config.json is not supported: at most 1e-6", setting="model")
    size, shared = hf.moe_intermediate_size, hf.get("moe_num_shared_experts", 0)
    mixture = MoE(
        Routing(hf.moe_num_experts, hf.moe_k),
        size,
        hf.hidden_act,
        bias_correction=True,
        shared=GatedMLP(size * shared, hf.hidden_act, bias) if shared else None,
    )
    first, every = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_interval", 1)
    last = hf.get("moe_layer_end_index", -1)
    last = dense.layers - 1 if last < 0 else last

    def has_experts(layer: int) -> bool:
        return first <= layer <= last and (layer + 1) % every == 0

    dense = dataclasses.replace(interleaved(dense), lm_head_bias=bias)
    return with_experts(dense, mixture, has_experts, ERNIE_MOE_NAMES)
