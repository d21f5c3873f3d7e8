"""What families of mixtures have in common: their usual weight names, which layers have experts, and DeepSeek's kind of
mixture, which many took over."""

import dataclasses
from collections.abc import Callable

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES
from quire.models.spec import DecoderSpec, GatedMLP, MoE, WeightNames

EXPERT_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        router="mlp.gate",
        router_bias="mlp.gate.e_score_correction_bias",
        experts_gate_up=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        experts_down="mlp.experts.{expert}.down_proj",
        shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    ),
    stacked={"experts_gate_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"},
)


def with_experts(
    dense: DecoderSpec, mixture: MoE, has_experts: Callable[[int], bool], weights: WeightNames
) -> DecoderSpec:
    """A copy in which some layers' feed-forward is the mixture."""
    mlps = tuple(mixture if has_experts(layer) else own for layer, own in enumerate(dense.mlps()))
    return dataclasses.replace(dense, mlp=mlps, weights=weights)


def deepseek_mixture(hf: HFConfig, *, has_bias: bool = True) -> MoE:
    """DeepSeek-V3's mixture: sigmoid scores, a bias on the choice, groups, shared experts. Without the bias V2's: softmax
    scores that are never renormalised."""
    grouped = has_bias or hf.get("topk_method") == "group_limited_greedy"
    routing = Routing(
        hf.n_routed_experts,
        hf.num_experts_per_tok,
        scoring="sigmoid" if has_bias else "softmax",
        renormalize=has_bias and bool(hf.get("norm_topk_prob", True)),
        groups=hf.get("n_group", 1) if grouped else 1,
        top_groups=hf.get("topk_group", 1) if grouped else 1,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
    )
    size, shared = hf.moe_intermediate_size, hf.get("n_shared_experts", 0)
    return MoE(
        routing,
        size,
        hf.hidden_act,
        bias_correction=has_bias,
        shared=GatedMLP(size * shared, hf.hidden_act, bias=bool(hf.get("mlp_bias", False))) if shared else None,
    )


def with_deepseek_mixtures(
    hf: HFConfig, dense: DecoderSpec, mixture: MoE, names: WeightNames = EXPERT_NAMES
) -> DecoderSpec:
    """Experts in all but the first layers; further layers of the checkpoint, which guess more tokens, are not read."""
    first, every = hf.get("first_k_dense_replace", 0), hf.get("moe_layer_freq", 1)
    kinds = hf.get("mlp_layer_types") or [
        "sparse" if layer >= first and layer % every == 0 else "dense" for layer in range(dense.layers)
    ]
    guessing = range(dense.layers, dense.layers + hf.get("num_nextn_predict_layers", 0))
    ignored = (*names.ignored, *(f"*layers.{layer}.*" for layer in guessing))
    weights = dataclasses.replace(names, ignored=ignored)
    return with_experts(dense, mixture, lambda layer: kinds[layer] == "sparse", weights)
