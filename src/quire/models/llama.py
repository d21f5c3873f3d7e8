"""Llama and its close kin: RMSNorm before each half, rotary positions, gated feed-forward."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.patterns import defaults, full_where_not_sliding, renamed, with_layers, with_rope
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLP, Attention, DecoderSpec, GatedMLP, Temperature, WeightNames

LLAMA_NAMES = WeightNames(
    modules={
        "embedding": "embed_tokens",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": "mlp.down_proj",
        "before_mixer": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
        "final_norm": "norm",
        "lm_head": "lm_head",
    }
)
UNGATED_NAMES = LLAMA_NAMES.but(drop=("gate_up",), up="mlp.up_proj")


def head_dim_of(hf: HFConfig) -> int:
    """`head_dim`, which need not be hidden_size / heads."""
    return int(hf.get("head_dim") or hf.hidden_size // hf.num_attention_heads)


@register(
    "LlamaForCausalLM", "LLaMAForCausalLM", "YiForCausalLM", "AquilaForCausalLM", "AquilaModel", "XverseForCausalLM"
)
@register("IQuestCoderForCausalLM", "TeleChat3ForCausalLM")
def llama(hf: HFConfig) -> DecoderSpec:
    """Llama 1 to 3, and models that only carry another name; none of them has a window, whatever its config says."""
    if "max_position_embeddings" not in hf:  # the first config.json of Llama
        hf = renamed(hf, max_position_embeddings="max_sequence_length")
    head_dim, bias = head_dim_of(hf), bool(hf.get("attention_bias", False))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(
            heads=hf.num_attention_heads,
            kv_heads=hf.get("num_key_value_heads", hf.num_attention_heads),
            head_dim=head_dim,
            rope=Rope.from_hf(hf, head_dim),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=GatedMLP(hf.intermediate_size, act=hf.get("hidden_act", "silu"), bias=bool(hf.get("mlp_bias", False))),
        norm=RMSNorm(hf.get("rms_norm_eps", 1e-6)),
        weights=LLAMA_NAMES,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


@register("MistralForCausalLM")
def mistral(hf: HFConfig) -> DecoderSpec:
    """Mistral: Llama, with a window where the config has one."""
    return llama(hf).with_attention(window=hf.get("sliding_window", 0))


@register("MinistralForCausalLM")
def ministral(hf: HFConfig) -> DecoderSpec:
    """Ministral 8B: windows in the layers that `layer_types` names, or in all."""
    return full_where_not_sliding(llama(hf).with_attention(qkv_bias=False, out_bias=False), hf)


@register("CwmForCausalLM")
def cwm(hf: HFConfig) -> DecoderSpec:
    """Code World Model: every fourth layer, the first among them, sees the whole context."""
    types = ["full_attention" if layer % 4 == 0 else "sliding_attention" for layer in range(hf.num_hidden_layers)]
    hf = defaults(hf, layer_types=types, sliding_window=8192)
    return full_where_not_sliding(llama(hf), hf)


@register("Ministral3ForCausalLM")
def ministral3(hf: HFConfig) -> DecoderSpec:
    """Ministral 3: queries grow with each multiple of the original context."""
    return mistral(hf).with_attention(temperature=temperature_of(hf))


def temperature_of(hf: HFConfig) -> Temperature | None:
    """How queries grow beyond the original context, as Mistral's configs tell it beside their rotation."""
    rope = hf.get("rope_parameters", hf.get("rope_scaling", HFConfig({})))
    beta, length = rope.get("llama_4_scaling_beta", 0.0), rope.get("original_max_position_embeddings")
    return Temperature(float(beta), int(length)) if beta and length else None


@register("SmolLM3ForCausalLM")
def smollm3(hf: HFConfig) -> DecoderSpec:
    """SmolLM3: every fourth layer knows no positions; where windows are used, these layers have them."""
    interval = hf.get("no_rope_layer_interval", 4)
    rotates = hf.get("no_rope_layers") or [(layer + 1) % interval for layer in range(hf.num_hidden_layers)]
    window = hf.get("sliding_window", 0) if hf.get("use_sliding_window", False) else 0
    types = ["full_attention" if rotated else "sliding_attention" for rotated in rotates]
    hf = defaults(HFConfig(hf.to_dict() | {"sliding_window": window}), layer_types=types, tie_word_embeddings=True)
    spec = full_where_not_sliding(llama(hf), hf)
    return with_layers(spec, tuple(not rotated for rotated in rotates), rope=None)


@register("HeliumForCausalLM")
def helium(hf: HFConfig) -> DecoderSpec:
    """Helium: Llama with interleaved rotation."""
    return interleaved(llama(hf)).with_attention(out_bias=False)


@register("Ernie4_5ForCausalLM")
def ernie4_5(hf: HFConfig) -> DecoderSpec:
    """ERNIE 4.5 (dense): interleaved rotation; biases everywhere or nowhere."""
    bias = bool(hf.get("use_bias", False))
    return interleaved(llama(defaults(hf, attention_bias=bias, mlp_bias=bias, tie_word_embeddings=True)))


@register("SeedOssForCausalLM")
def seed_oss(hf: HFConfig) -> DecoderSpec:
    """Seed-OSS: biases on q, k and v, and a setting of its own for the output's."""
    spec = llama(defaults(hf, attention_bias=True))
    return spec.with_attention(out_bias=bool(hf.get("attention_out_bias", False)))


@register("InternLMForCausalLM", "InternLM3ForCausalLM", "PanguEmbeddedForCausalLM")
def internlm(hf: HFConfig) -> DecoderSpec:
    """InternLM 1 (`bias`: of all attention's matrices) and 3 (`bias`: of the output's and the feed-forward's)."""
    bias, is_third = bool(hf.get("bias", False)), "qkv_bias" in hf
    spec = llama(defaults(hf, mlp_bias=bias and is_third))
    return spec.with_attention(qkv_bias=bool(hf.get("qkv_bias", bias)), out_bias=bias)


@register("ArceeForCausalLM")
def arcee(hf: HFConfig) -> DecoderSpec:
    """Arcee: Llama's attention, and a feed-forward of squared ReLUs without a gate."""
    mlp = MLP(hf.intermediate_size, hf.get("hidden_act", "relu2"), bias=bool(hf.get("mlp_bias", False)))
    return dataclasses.replace(llama(hf), mlp=mlp, weights=UNGATED_NAMES)


@register("ApertusForCausalLM")
def apertus(hf: HFConfig) -> DecoderSpec:
    """Apertus: norms of heads, and a feed-forward whose activation (xIELU) is learned."""
    names = UNGATED_NAMES.but(
        before_mixer="attention_layernorm",
        before_mlp="feedforward_layernorm",
        act_positive="mlp.act_fn.alpha_p",
        act_negative="mlp.act_fn.alpha_n",
    )
    names = dataclasses.replace(names, ignored=(*names.ignored, "*.act_fn.beta", "*.act_fn.bias", "*.act_fn.eps"))
    spec = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps))
    return dataclasses.replace(spec, mlp=MLP(hf.intermediate_size, hf.get("hidden_act", "xielu")), weights=names)


@register("HunYuanDenseV1ForCausalLM")
def hunyuan_dense(hf: HFConfig) -> DecoderSpec:
    """HunYuan (dense): norms of heads after rotation; a fixed stretch of the rotation's base (`alpha`)."""
    names = LLAMA_NAMES.but(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
    norm = RMSNorm(hf.rms_norm_eps) if hf.get("use_qk_norm", True) else None
    spec = llama(hf).with_attention(qk_norm=norm, qk_norm_after_rope=norm is not None)
    return dataclasses.replace(spec, weights=names)


def interleaved(spec: DecoderSpec) -> DecoderSpec:
    """A copy that rotates pairs of neighbours."""
    return with_rope(spec, interleaved=True)
