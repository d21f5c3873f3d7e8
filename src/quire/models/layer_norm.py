"""Llama's plan with layer norms: StableLM, Orion, Nemotron, Jais 2, Persimmon, StarCoder2, Phi, Command R."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, UNGATED_NAMES, interleaved, llama, mistral
from quire.models.mixtures import EXPERT_NAMES, with_experts
from quire.models.patterns import defaults, full_where_not_sliding, kinds_of, layer_norm_of, with_layers
from quire.models.registry import register
from quire.models.residual import PARALLEL, PRE, LayerNorm, RMSNorm
from quire.models.spec import MLP, DecoderSpec, GatedMLP, MoE

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


STARCODER2_NAMES = LLAMA_NAMES.but(drop=("gate_up",), up="mlp.c_fc", down="mlp.c_proj")


@register("Starcoder2ForCausalLM")
def starcoder2(hf: HFConfig) -> DecoderSpec:
    """StarCoder2 in all sizes."""
    bias = bool(hf.get("use_bias", True))
    return dataclasses.replace(
        mistral(defaults(hf, attention_bias=bias, tie_word_embeddings=True)),
        mlp=MLP(hf.intermediate_size, act=hf.hidden_act, bias=bias),
        norm=LayerNorm(hf.norm_epsilon),
        weights=STARCODER2_NAMES,
    )


PHI_NAMES = LLAMA_NAMES.but(
    drop=("gate_up", "before_mlp"),
    out="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up="mlp.fc1",
    down="mlp.fc2",
    final_norm="final_layernorm",
    lm_head_bias="lm_head.bias",
)
PHI3_NAMES = LLAMA_NAMES.but(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


@register("PhiForCausalLM")
def phi(hf: HFConfig) -> DecoderSpec:
    """Phi-1, Phi-1.5, Phi-2."""
    norm = LayerNorm(hf.layer_norm_eps)
    spec = llama(defaults(hf, partial_rotary_factor=0.5)).with_attention(qkv_bias=True, out_bias=True)
    return dataclasses.replace(
        spec.with_attention(qk_norm=norm if hf.get("qk_layernorm", False) else None),
        mlp=MLP(hf.intermediate_size, act=hf.hidden_act, bias=True),
        norm=norm,
        placement=PARALLEL,
        weights=PHI_NAMES,
        lm_head_bias=True,
    )


@register("Phi3ForCausalLM")
def phi3(hf: HFConfig) -> DecoderSpec:
    """Phi-3, Phi-3.5, Phi-4 (dense)."""
    return dataclasses.replace(mistral(hf), weights=PHI3_NAMES)


@register("CohereForCausalLM")
def cohere(hf: HFConfig) -> DecoderSpec:
    """Command R."""
    norm = LayerNorm(hf.layer_norm_eps, bias=False)
    qk_norm = norm if hf.get("use_qk_norm", False) else None
    spec = interleaved(llama(defaults(hf, tie_word_embeddings=True)))
    return dataclasses.replace(
        spec.with_attention(qk_norm=qk_norm, qk_norm_span="heads"),
        norm=norm,
        placement=PARALLEL,
        weights=LLAMA_NAMES.but(drop=("before_mlp",)),
        logits_scale=float(hf.get("logit_scale", 1.0)),
    )


@register("Cohere2ForCausalLM")
def cohere2(hf: HFConfig) -> DecoderSpec:
    """Command R7B: windowed layers rotate; full ones know no positions."""
    return full_where_not_sliding(cohere(hf).with_attention(qk_norm=None), hf, every=4, rope=None)


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
    return with_experts(dense, _cohere_mixture(hf), lambda layer: kinds[layer] == "sparse", names)


def _cohere_mixture(hf: HFConfig) -> MoE:
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
