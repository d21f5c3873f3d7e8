"""Cohere 2 with experts: both halves in parallel, shared experts that are added to the others or averaged with them."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.cohere import cohere
from quire.models.mixtures import EXPERT_NAMES, with_experts
from quire.models.patterns import defaults, kinds_of, with_layers
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import DecoderSpec, GatedMLP, MoE


@register("Cohere2MoeForCausalLM")
def cohere2_moe(hf: HFConfig) -> DecoderSpec:
    """Layers with a window rotate; of the others only the dense ones at the beginning may."""
    if "rope_parameters" in hf:  # beside them the config class writes its default of an older field
        hf = HFConfig({name: value for name, value in hf.to_dict().items() if name != "rope_theta"})
    hf = defaults(hf, layer_norm_eps=1e-5, logit_scale=0.0625)
    first, every = hf.get("first_k_dense_replace", 0), hf.get("sliding_window_pattern", 4)
    every_dense, layers = hf.get("prefix_dense_sliding_window_pattern", 1), range(hf.num_hidden_layers)
    kinds = hf.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in layers]
    types = kinds_of(hf, "sliding_attention", "full_attention")
    if types is None:
        turns = [(layer + 1) % every_dense if layer < first else (layer - first + 1) % every for layer in layers]
        types = ["sliding_attention" if turn else "full_attention" for turn in turns]
    is_full = tuple(kind == "full_attention" for kind in types)
    still = tuple(
        full and not (kind == "dense" and every_dense == 1) for full, kind in zip(is_full, kinds, strict=True)
    )
    size = hf.intermediate_size
    dense = cohere(HFConfig(hf.to_dict() | {"intermediate_size": hf.get("prefix_dense_intermediate_size", size)}))
    dense = with_layers(dense.with_attention(window=hf.sliding_window), is_full, window=0)
    dense = with_layers(dense, still, rope=None)
    if hf.get("rms_norm_eps") is not None:
        dense = dataclasses.replace(dense, norm=RMSNorm(hf.rms_norm_eps))
    names = EXPERT_NAMES.but(drop=("before_mlp",))
    return with_experts(dense, _mixture(hf), lambda layer: kinds[layer] == "sparse", names)


def _mixture(hf: HFConfig) -> MoE:
    size, shared = hf.intermediate_size, hf.get("num_shared_experts", 0)
    averaged = shared and hf.get("shared_expert_combination_strategy", "average") == "average"
    scoring, share = hf.get("expert_selection_fn", "softmax"), 0.5 if averaged else 1.0
    return MoE(
        Routing(
            hf.num_experts,
            hf.num_experts_per_tok,
            scoring,
            renormalize=scoring == "softmax" or bool(hf.get("norm_topk_prob", True)),
            scale=share,
        ),
        size,
        hf.hidden_act,
        shared=GatedMLP(size * shared, hf.hidden_act, out_scale=share) if shared else None,
    )
