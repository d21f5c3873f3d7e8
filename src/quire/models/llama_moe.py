"""Llama-like attention with experts in most layers: OLMoE, FlexOlmo, HunYuan, Mellum, Ling."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, head_dim_of, llama
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_deepseek_mixtures, with_experts
from quire.models.patterns import defaults, full_where_not_sliding, renamed
from quire.models.registry import register
from quire.models.residual import POST, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import DecoderSpec, GatedMLP, MoE

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
        hf, n_routed_experts="num_experts", n_shared_experts="num_shared_experts",
        routed_scaling_factor="router_scaling_factor",
    )  # fmt: skip
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
