"""GLM (dense): interleaved rotation of half of each head; and Llama's attention with DeepSeek-V3's mixture: GLM-4.5 and later,
dots.llm1, Solar Open, K-EXAONE, Trinity."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import LLAMA_NAMES, interleaved, llama
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_deepseek_mixtures
from quire.models.patterns import defaults, full_where_not_sliding, renamed, residual_placement
from quire.models.qwen import with_windows
from quire.models.registry import register
from quire.models.residual import SANDWICH, RMSNorm
from quire.models.spec import DecoderSpec, WeightNames

GLM_NAMES = LLAMA_NAMES.but(gate_up="mlp.gate_up_proj")
GLM4_NAMES = GLM_NAMES.but(
    after_mixer="post_self_attn_layernorm", before_mlp="post_attention_layernorm", after_mlp="post_mlp_layernorm"
)
CHATGLM_NAMES = WeightNames(
    modules={
        "embedding": "embedding.word_embeddings",
        "qkv": "self_attention.query_key_value",
        "out": "self_attention.dense",
        "gate_up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        "before_mixer": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
        "final_norm": "encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
    },
    prefixes=("transformer.",),
    layer="encoder.layers.{layer}.",
)


@register("GlmForCausalLM")
def glm(hf: HFConfig) -> DecoderSpec:
    """GLM-4 (as Transformers stores it)."""
    spec = interleaved(llama(defaults(hf, partial_rotary_factor=0.5, attention_bias=True, head_dim=128)))
    return dataclasses.replace(spec.with_attention(out_bias=False), weights=GLM_NAMES)


@register("Glm4ForCausalLM")
def glm4(hf: HFConfig) -> DecoderSpec:
    """GLM-4-0414: norms before and after each half."""
    return dataclasses.replace(glm(defaults(hf, attention_bias=False)), placement=SANDWICH, weights=GLM4_NAMES)


@register("ChatGLMModel", "ChatGLMForConditionalGeneration")
def chatglm(hf: HFConfig) -> DecoderSpec:
    """ChatGLM2 and 3, GLM-4 (as they were first stored).

    Raises:
        ConfigError: the first ChatGLM, another model under the same names.
    """
    if hf.get("position_encoding_2d", False):
        raise ConfigError(
            "ChatGLM-6B (position_encoding_2d) is not supported; known: ChatGLM2, ChatGLM3, GLM-4", setting="model"
        )
    hf = renamed(
        hf,
        num_hidden_layers="num_layers",
        head_dim="kv_channels",
        intermediate_size="ffn_hidden_size",
        vocab_size="padded_vocab_size",
        max_position_embeddings="seq_length",
        attention_bias="add_qkv_bias",
        mlp_bias="add_bias_linear",
        rms_norm_eps="layernorm_epsilon",
    )
    if hf.get("multi_query_attention", False):
        hf = renamed(hf, num_key_value_heads="multi_query_group_num")
    theta = 10000.0 * hf.get("rope_ratio", 1.0)
    spec = glm(defaults(hf, rope_theta=theta, mlp_bias=False, tie_word_embeddings=False))
    spec = spec.with_attention(out_bias=bool(hf.get("mlp_bias", False)))
    norm = RMSNorm(hf.get("layernorm_epsilon", 1e-5))
    return dataclasses.replace(spec, weights=CHATGLM_NAMES, norm=norm, placement=residual_placement(hf))


AFMOE_NAMES = dataclasses.replace(
    EXPERT_NAMES.but(
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
        after_mixer="post_attention_layernorm",
        before_mlp="pre_mlp_layernorm",
        after_mlp="post_mlp_layernorm",
        router="mlp.router.gate",
        router_bias="mlp.expert_bias",
    ),
    unbiased=("gate_proj",),
)


@register("Glm4MoeForCausalLM")
def glm4_moe(hf: HFConfig) -> DecoderSpec:
    """GLM-4.5, GLM-4.5-Air, GLM-4.6: half of each head is rotated; the large ones norm queries and keys."""
    dense = llama(HFConfig({"partial_rotary_factor": 0.5} | hf.to_dict()))
    norm = RMSNorm(hf.rms_norm_eps) if hf.get("use_qk_norm", False) else None
    dense = dense.map_attention(lambda attention: dataclasses.replace(attention, out_bias=False, qk_norm=norm))
    return with_deepseek_mixtures(hf, dense, deepseek_mixture(hf))


@register("Dots1ForCausalLM")
def dots1(hf: HFConfig) -> DecoderSpec:
    """dots.llm1: norms of query and key heads, windows in some layers."""
    dense = with_windows(llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps)), hf)
    return with_deepseek_mixtures(hf, dense, deepseek_mixture(hf))


@register("SolarOpenForCausalLM")
def solar_open(hf: HFConfig) -> DecoderSpec:
    """Solar Open: experts in every layer."""
    hf = HFConfig(hf.to_dict() | {"first_k_dense_replace": 0, "intermediate_size": hf.moe_intermediate_size})
    return with_deepseek_mixtures(hf, llama(hf).with_attention(out_bias=False), deepseek_mixture(hf))


@register("ExaoneMoeForCausalLM")
def exaone_moe(hf: HFConfig) -> DecoderSpec:
    """K-EXAONE: norms of heads; where there are windows, layers without one know no positions."""
    hf = renamed(hf, n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    hf = defaults(hf, first_k_dense_replace=1, routed_scaling_factor=2.5)
    full = {"rope": None} if hf.get("sliding_window") else {}
    dense = full_where_not_sliding(llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps)), hf, every=4, **full)
    names = EXPERT_NAMES.but(router_bias="mlp.e_score_correction_bias")
    names = dataclasses.replace(names, ignored=(*names.ignored, "mtp.*", "model.mtp.*"))
    return with_deepseek_mixtures(hf, dense, deepseek_mixture(hf), names)


@register("AfmoeForCausalLM")
def afmoe(hf: HFConfig) -> DecoderSpec:
    """Trinity: attention with a gate, norms before and after each half; layers without a window know no positions."""
    hf = renamed(
        hf,
        n_routed_experts="num_experts",
        n_shared_experts="num_shared_experts",
        routed_scaling_factor="route_scale",
        first_k_dense_replace="num_dense_layers",
    )
    dense = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), output_gate=True)
    dense = full_where_not_sliding(dense, hf, every=hf.get("global_attn_every_n_layers", 4), rope=None)
    dense = dataclasses.replace(
        dense,
        placement=SANDWICH,
        embedding_scale=hf.hidden_size**0.5 if hf.get("mup_enabled", False) else 1.0,
        scales_given=True,
    )
    return with_deepseek_mixtures(hf, dense, deepseek_mixture(hf), AFMOE_NAMES)
