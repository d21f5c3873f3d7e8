"""Llama's plan with a multiplier on embeddings, scores, residuals and logits: Granite 3 and 4, MiniCPM, HyperCLOVA X."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, head_dim_of, llama
from quire.models.mamba import mamba2_of, ssm_names
from quire.models.patterns import defaults, full_where_not_sliding, kinds_of
from quire.models.registry import register
from quire.models.residual import SANDWICH
from quire.models.spec import DecoderSpec, GatedMLP, MoE


@register("GraniteForCausalLM")
def granite(hf: HFConfig) -> DecoderSpec:
    """Granite 3 (dense)."""
    return dataclasses.replace(
        llama(hf).with_attention(scale=float(hf.get("attention_multiplier", 1.0))),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        scales_given=True,
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logits_scale=1.0 / float(hf.get("logits_scaling", 1.0)),
    )


@register("GraniteSWAForCausalLM")
def granite_swa(hf: HFConfig) -> DecoderSpec:
    """Granite with windows, sinks, and a rotation of its own (or none) in each layer."""
    types = ["full_attention" if layer % 4 == 0 else "sliding_attention" for layer in range(hf.num_hidden_layers)]
    hf = defaults(hf, layer_types=types, sliding_window=128, tie_word_embeddings=True)
    spec = full_where_not_sliding(granite(hf).with_attention(sinks=True), hf)
    mixers = list(spec.attentions())
    for layer, theta in zip(range(spec.layers), hf.get("layer_rope_theta") or (), strict=False):
        rope = mixers[layer].rope
        turned = None if rope is None or not theta else dataclasses.replace(rope, theta=float(theta))
        mixers[layer] = dataclasses.replace(mixers[layer], rope=turned)
    return dataclasses.replace(spec, mixer=tuple(mixers), weights=LLAMA_NAMES.but(sinks="self_attn.sinks"))


@register("HyperCLOVAXForCausalLM")
def hyperclovax(hf: HFConfig) -> DecoderSpec:
    """HyperCLOVA X: logits multiplied rather than divided; norms after each half too, unless `use_post_norm` is false."""
    spec = granite(hf).with_attention(scale=hf.get("attention_multiplier", head_dim_of(hf) ** -0.5))
    spec = dataclasses.replace(spec, logits_scale=float(hf.get("logits_scaling", 1.0)))
    if not hf.get("use_post_norm", True):
        return spec
    return dataclasses.replace(
        spec, placement=SANDWICH, weights=LLAMA_NAMES.but(after_mixer="post_norm1", after_mlp="post_norm2")
    )


@register("TeleFLMForCausalLM")
def teleflm(hf: HFConfig) -> DecoderSpec:
    """Tele-FLM: embeddings and logits scaled by width (muP)."""
    if not hf.get("use_mup", False):
        return llama(hf)
    logits = float(hf.get("output_mult", 1.0)) / float(hf.get("mup_scale_factor", 1.0))
    return dataclasses.replace(llama(hf), embedding_scale=float(hf.get("input_mult", 1.0)), logits_scale=logits)


@register("MiniCPMForCausalLM")
def minicpm(hf: HFConfig) -> DecoderSpec:
    """MiniCPM 1 and 2: residuals scaled by depth, logits by width."""
    depth, base = hf.get("scale_depth", 1.0), hf.get("dim_model_base", hf.hidden_size)
    return dataclasses.replace(
        llama(defaults(hf, tie_word_embeddings=True)),
        embedding_scale=float(hf.get("scale_emb", 1.0)),
        residual_scale=depth / hf.num_hidden_layers**0.5,
        logits_scale=base / hf.hidden_size,
    )


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


GRANITE_HYBRID_NAMES = GRANITE_MOE_NAMES.but(
    (), **ssm_names("mamba."), gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear"
)


@register("GraniteMoeHybridForCausalLM")
def granite_hybrid(hf: HFConfig) -> DecoderSpec:
    """Granite 4 (Tiny, Small, Micro)."""
    spec, mamba = granite(hf), mamba2_of(hf, norm_groups=hf.get("mamba_n_groups", 1))
    (attention, *_) = spec.attentions()
    if hf.get("position_embedding_type") != "rope":
        attention = dataclasses.replace(attention, rope=None)
    hf = defaults(hf, layer_types=hf.get("layers_block_type", ["mamba"] * spec.layers))
    kinds = kinds_of(hf, "mamba", "attention", "linear_attention", "full_attention") or ()
    has_experts = hf.get("num_local_experts", 0) > 0
    return dataclasses.replace(
        spec,
        mixer=tuple(attention if kind in ("attention", "full_attention") else mamba for kind in kinds),
        mlp=granite_mixture(hf) if has_experts else GatedMLP(hf.shared_intermediate_size, hf.hidden_act),
        weights=GRANITE_HYBRID_NAMES,
    )
