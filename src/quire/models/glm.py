"""GLM: interleaved rotation of half of each head, biases on q, k, v, one matrix for gate and up."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import LLAMA_NAMES, interleaved, llama
from quire.models.patterns import defaults, renamed, residual_placement
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
        hf, num_hidden_layers="num_layers", head_dim="kv_channels", intermediate_size="ffn_hidden_size",
        vocab_size="padded_vocab_size", max_position_embeddings="seq_length", attention_bias="add_qkv_bias",
        mlp_bias="add_bias_linear", rms_norm_eps="layernorm_epsilon",
    )  # fmt: skip
    if hf.get("multi_query_attention", False):
        hf = renamed(hf, num_key_value_heads="multi_query_group_num")
    theta = 10000.0 * hf.get("rope_ratio", 1.0)
    spec = glm(defaults(hf, rope_theta=theta, mlp_bias=False, tie_word_embeddings=False))
    spec = spec.with_attention(out_bias=bool(hf.get("mlp_bias", False)))
    norm = RMSNorm(hf.get("layernorm_epsilon", 1e-5))
    return dataclasses.replace(spec, weights=CHATGLM_NAMES, norm=norm, placement=residual_placement(hf))
