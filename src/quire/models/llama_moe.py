"""Llama's attention with experts: OLMoE, HunYuan, Mellum, Ling, Mixtral, PhiMoE, MiniMax-M2, ERNIE 4.5, Llama 4, gpt-oss."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import ClampedSwiglu, Routing
from quire.models.llama import LLAMA_NAMES, head_dim_of, interleaved, llama, mistral
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_deepseek_mixtures, with_experts
from quire.models.patterns import defaults, full_where_not_sliding, kinds_of, renamed
from quire.models.registry import register
from quire.models.residual import POST, LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE, Temperature

HUNYUAN_NAMES = EXPERT_NAMES.but(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)
BAILING_NAMES = EXPERT_NAMES.but(
    embedding="word_embeddings",
    qkv="attention.query_key_value",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
    out="attention.dense",
    router_bias="mlp.gate.expert_bias",
)


def _softmax_routing(hf: HFConfig, renormalize: bool = False) -> Routing:
    return Routing(hf.num_experts, hf.num_experts_per_tok, renormalize=bool(hf.get("norm_topk_prob", renormalize)))


@register("OlmoeForCausalLM")
def olmoe(hf: HFConfig) -> DecoderSpec:
    """OLMoE: norms over all query and all key heads at once; queries, keys and values may be clipped."""
    attention = llama(hf).with_attention(
        qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_span="all", clip_qkv=float(hf.get("clip_qkv", 0.0))
    )
    mixture = MoE(_softmax_routing(hf), hf.intermediate_size, hf.hidden_act)
    return dataclasses.replace(attention, mlp=mixture, weights=EXPERT_NAMES)


@register("FlexOlmoForCausalLM")
def flex_olmo(hf: HFConfig) -> DecoderSpec:
    """FlexOlmo: as OLMoE, with norms after each half."""
    names = EXPERT_NAMES.but(
        drop=("before_mixer", "before_mlp"),
        after_mixer="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    )
    return dataclasses.replace(olmoe(hf), placement=POST, weights=names)


@register("HunYuanMoEV1ForCausalLM")
def hunyuan_moe(hf: HFConfig) -> DecoderSpec:
    """HunYuan-A13B: norms of heads after rotation, and a shared expert of the same size as each."""
    dense = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_after_rope=True)
    experts, top_k = (_of_layers(value, dense.layers) for value in (hf.num_experts, hf.moe_topk))
    shared = GatedMLP(hf.intermediate_size, hf.hidden_act)
    mlps = tuple(
        MoE(Routing(count, chosen), hf.intermediate_size, hf.hidden_act, shared=shared)
        for count, chosen in zip(experts, top_k, strict=True)
    )
    return dataclasses.replace(dense, mlp=mlps, weights=HUNYUAN_NAMES)


def _of_layers(value: int | list[int], layers: int) -> list[int]:
    return value if isinstance(value, list) else [value] * layers


@register("HYV3ForCausalLM")
def hy_v3(hf: HFConfig) -> DecoderSpec:
    """HunYuan 3: DeepSeek-V3's kind of mixture under names of its own."""
    hf = renamed(
        hf,
        n_routed_experts="num_experts",
        n_shared_experts="num_shared_experts",
        routed_scaling_factor="router_scaling_factor",
    )
    hf = defaults(hf, first_k_dense_replace=1)
    names = HUNYUAN_NAMES.but(
        q_norm=LLAMA_NAMES.modules["q_norm"],
        k_norm=LLAMA_NAMES.modules["k_norm"],
        router="mlp.router.gate",
        router_bias="mlp.expert_bias",
    )
    dense, mixture = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps)), deepseek_mixture(hf)
    if hf.n_shared_experts == 0:  # Transformers' class then gives the shared one the dense layers' width
        mixture = dataclasses.replace(mixture, shared=dense.mlps()[0])
    return with_deepseek_mixtures(hf, dense, mixture, names)


@register("MellumForCausalLM")
def mellum(hf: HFConfig) -> DecoderSpec:
    """Mellum 2: windows in some layers, whose rotation has a base of its own."""
    spec = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps))
    full, sliding = (Rope.from_hf(hf, head_dim_of(hf), kind) for kind in ("full_attention", "sliding_attention"))
    spec = full_where_not_sliding(spec.with_attention(rope=sliding), hf, every=1, rope=full)
    mixture = MoE(
        _softmax_routing(renamed(hf, num_experts="num_local_experts"), True), hf.moe_intermediate_size, hf.hidden_act
    )
    kinds = hf.get("mlp_layer_types") or ["sparse"] * spec.layers
    names = dataclasses.replace(EXPERT_NAMES, ignored=(*EXPERT_NAMES.ignored, "mtp.*"))
    return with_experts(spec, mixture, lambda layer: kinds[layer] == "sparse", names)


@register("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM")
def bailing_moe(hf: HFConfig) -> DecoderSpec:
    """Ling and Ring: softmax scores and shared experts (1), or DeepSeek-V3's kind of mixture and norms of heads (2)."""
    is_second = hf.get("score_function") == "sigmoid"
    hf = renamed(hf, n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    mixture = deepseek_mixture(hf, has_bias=is_second)
    if not is_second:
        mixture = dataclasses.replace(mixture, routing=_softmax_routing(hf))
    qk_norm = RMSNorm(hf.rms_norm_eps) if hf.get("use_qk_norm", is_second) else None
    dense = llama(hf).with_attention(
        qk_norm=qk_norm, qkv_bias=bool(hf.get("use_qkv_bias", False)), out_bias=bool(hf.get("use_bias", False))
    )
    return with_deepseek_mixtures(hf, dense, mixture, BAILING_NAMES)


@register("SarvamMoEForCausalLM")
def sarvam_moe(hf: HFConfig) -> DecoderSpec:
    """Sarvam 30B: GLM-4.5's layers with Ling's names of weights."""
    hf = renamed(hf, n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    norm = RMSNorm(hf.get("rms_norm_eps", 1e-6)) if hf.get("use_qk_norm", True) else None
    dense = llama(hf).with_attention(qk_norm=norm, out_bias=False)
    return with_deepseek_mixtures(hf, dense, deepseek_mixture(hf), BAILING_NAMES)


MIXTRAL_NAMES = LLAMA_NAMES.but(
    lm_head_bias="lm_head.bias",
    router="block_sparse_moe.gate",
    router_bias="block_sparse_moe.e_score_correction_bias",
    experts_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    experts_down="block_sparse_moe.experts.{expert}.w2",
)


@register("MixtralForCausalLM")
def mixtral(hf: HFConfig) -> DecoderSpec:
    """Mixtral 8x7B and 8x22B."""
    mixture = MoE(Routing(hf.num_local_experts, hf.num_experts_per_tok), hf.intermediate_size, hf.hidden_act)
    return dataclasses.replace(mistral(hf), mlp=mixture, weights=MIXTRAL_NAMES)


@register("PhimoeForCausalLM", "PhiMoEForCausalLM")
def phimoe(hf: HFConfig) -> DecoderSpec:
    """Phi-3.5-MoE: layer norms, biases, and two experts that are chosen one after the other."""
    routing = Routing(
        hf.num_local_experts, 2, "sparsemixer", renormalize=False, jitter=float(hf.get("router_jitter_noise", 0.01))
    )
    spec = mistral(hf)
    return dataclasses.replace(
        spec.with_attention(rope=_stretched(hf, spec.attentions()[0].rope)),
        mlp=MoE(routing, hf.intermediate_size, hf.hidden_act),
        norm=LayerNorm(hf.rms_norm_eps),
        lm_head_bias=bool(hf.get("lm_head_bias", False)),
        weights=MIXTRAL_NAMES,
    )


def _stretched(hf: HFConfig, rope: Rope | None) -> Rope | None:
    """With the factor on cosines and sines that the config names."""
    section = hf.get("rope_scaling") or hf.get("rope_parameters")
    if rope is None or rope.scaling is None or section.get("long_mscale") is None:
        return rope
    is_long = hf.max_position_embeddings > rope.scaling.original_max_positions
    factor = float(section.long_mscale if is_long else section.short_mscale)
    return dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, attention_factor=factor))


@register("MiniMaxM2ForCausalLM")
def minimax_m2(hf: HFConfig) -> DecoderSpec:
    """MiniMax-M2: norms over all query and all key heads at once, half of each head rotated, a bias on the choice."""
    rotated = hf.get("rotary_dim", hf.head_dim) / hf.head_dim
    spec = llama(HFConfig({"partial_rotary_factor": rotated} | hf.to_dict()))
    routing = Routing(hf.num_local_experts, hf.num_experts_per_tok, "sigmoid")
    return dataclasses.replace(
        spec.with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_span="all"),
        mlp=MoE(routing, hf.intermediate_size, hf.hidden_act, bias_correction=True),
        weights=MIXTRAL_NAMES,
    )


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


LLAMA4_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
        shared_down="feed_forward.shared_expert.down_proj",
        experts_gate_up=("feed_forward.experts.{expert}.gate_proj", "feed_forward.experts.{expert}.up_proj"),
        experts_down="feed_forward.experts.{expert}.down_proj",
    ),
    stacked={"experts_gate_up": "feed_forward.experts.gate_up_proj", "experts_down": "feed_forward.experts.down_proj"},
    transposed=("experts_gate_up", "experts_down"),
)


@register("Llama4ForCausalLM")
def llama4(hf: HFConfig) -> DecoderSpec:
    """Scout (16 experts) and Maverick (128, in every other layer)."""
    size = hf.intermediate_size
    dense = llama(HFConfig(hf.to_dict() | {"intermediate_size": hf.get("intermediate_size_mlp", size)}))
    mixture = MoE(
        Routing(hf.num_local_experts, hf.num_experts_per_tok, "sigmoid", renormalize=False),
        size,
        hf.hidden_act,
        scales_input=True,
        shared=GatedMLP(size, hf.hidden_act),
    )
    every = hf.get("interleave_moe_layer_step", 1)
    sparse = hf.get("moe_layers", range(every - 1, dense.layers, every))
    dense = dataclasses.replace(dense, mixer=_attentions(hf, dense))
    return with_experts(dense, mixture, lambda layer: layer in sparse, LLAMA4_NAMES)


def _attentions(hf: HFConfig, dense: DecoderSpec) -> tuple[Attention, ...]:
    (base, *_) = dense.attentions()
    assert base.rope is not None
    every, layers = hf.get("no_rope_layer_interval", 4), range(dense.layers)
    rotates = hf.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in layers]
    own = ["chunked_attention" if turns else "full_attention" for turns in rotates]
    kinds = kinds_of(hf, "chunked_attention", "full_attention") or own
    rope, norm = dataclasses.replace(base.rope, interleaved=True), None
    if hf.get("use_qk_norm", True):
        # The norm has no weight: it may as well come before the rotation, which keeps lengths once its amplitude is gone.
        amplitude = float(rope.table(1)[0, 0])
        norm = RMSNorm(hf.rms_norm_eps / amplitude**2, weight=False)
        if rope.scaling is not None:
            rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, attention_factor=1.0))
    rotated = dataclasses.replace(base, rope=rope, qk_norm=norm)
    temperature = Temperature(float(hf.get("attn_scale", 0.1)), int(hf.get("floor_scale", 8192)), offset=1)
    still = dataclasses.replace(
        base, rope=None, temperature=temperature if hf.get("attn_temperature_tuning", True) else None
    )
    chunk = hf.get("attention_chunk_size", 0)
    return tuple(
        dataclasses.replace(rotated if turns else still, chunk=chunk if kind == "chunked_attention" else 0)
        for turns, kind in zip(rotates, kinds, strict=True)
    )


GPT_OSS_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        sinks="self_attn.sinks",
        router="mlp.router",
        experts_gate_up_bias="mlp.experts.gate_up_proj_bias",
        experts_down_bias="mlp.experts.down_proj_bias",
    ),
    stacked={"experts_gate_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"},
    transposed=("experts_gate_up", "experts_down"),
    interleaved=("experts_gate_up", "experts_gate_up_bias"),
)

BY_EXPERT = dataclasses.replace(
    GPT_OSS_NAMES.but(
        experts_gate_up=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        experts_down="mlp.experts.{expert}.down_proj",
    ),
    stacked={},
    transposed=(),
    interleaved=("experts_gate_up_bias",),
)
"""As GGUF files have them."""


@register("GptOssForCausalLM")
def gpt_oss(hf: HFConfig) -> DecoderSpec:
    """gpt-oss-20b and gpt-oss-120b."""
    types = [("sliding_attention", "full_attention")[layer % 2] for layer in range(hf.num_hidden_layers)]
    hf = defaults(hf, attention_bias=True, layer_types=types)
    stored = hf.quantization_config.get("quant_method") if "quantization_config" in hf else None
    return dataclasses.replace(
        full_where_not_sliding(llama(hf).with_attention(sinks=True), hf),
        mlp=MoE(
            Routing(hf.num_local_experts, hf.num_experts_per_tok),
            hf.intermediate_size,
            hf.hidden_act,
            router_bias=True,
            experts_bias=True,
            clamp=ClampedSwiglu(float(hf.get("swiglu_alpha", 1.702)), float(hf.get("swiglu_limit", 7.0))),
        ),
        weights=BY_EXPERT if stored == "gguf" else GPT_OSS_NAMES,
    )
