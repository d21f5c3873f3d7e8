"""DeepSeek-V2 and V3 and what has their latent attention: Kimi-K2, GLM-5, Mistral 4, MiniCPM3, LongCat-Flash, HunYuan 4."""

import dataclasses
import math
from typing import cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import ClampedSwiglu, Routing
from quire.models.llama import LLAMA_NAMES, llama, temperature_of
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_deepseek_mixtures, with_experts
from quire.models.patterns import defaults, renamed
from quire.models.registry import register
from quire.models.residual import HyperConnections, LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLA, DecoderSpec, GatedMLP, MoE, WeightNames
from quire.models.variants import Indexer, SparseMLA

_LATENT = {
    "q": "self_attn.q_proj",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
}
LATENT_NAMES = LLAMA_NAMES.but(drop=("qkv", "q_norm", "k_norm"), **_LATENT)


def latent_decoder(hf: HFConfig, weights: WeightNames = LATENT_NAMES, *, interleaved: bool) -> DecoderSpec:
    """A decoder with latent attention whose layers are all dense."""
    rope_dim, bias = hf.qk_rope_head_dim, bool(hf.get("attention_bias", False))
    rope = dataclasses.replace(Rope.from_hf(hf, rope_dim), rotary_dim=rope_dim, interleaved=interleaved)
    mixer = MLA(
        heads=hf.num_attention_heads,
        nope_dim=hf.qk_nope_head_dim,
        value_dim=hf.get("v_head_dim") or hf.hidden_size // hf.num_attention_heads,
        kv_rank=hf.kv_lora_rank,
        q_rank=hf.get("q_lora_rank") or 0,
        rope=rope,
        # The latents' norms have an epsilon of their own, which no config tells.
        norm=RMSNorm(1e-6),
        scale=(hf.qk_nope_head_dim + rope_dim) ** -0.5 * _sharpening(rope) ** 2,
        in_bias=bias,
        out_bias=bias,
    )
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=mixer,
        mlp=GatedMLP(hf.intermediate_size, act=hf.hidden_act, bias=bool(hf.get("mlp_bias", False))),
        norm=RMSNorm(hf.rms_norm_eps),
        weights=weights,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def _sharpening(rope: Rope) -> float:
    """What the scores' scale is multiplied with, twice, where the context was stretched."""
    scaling = rope.scaling
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0


def _mixture_names() -> WeightNames:
    return EXPERT_NAMES.but(drop=("qkv", "q_norm", "k_norm"), **_LATENT)


@register("DeepseekForCausalLM")
def deepseek(hf: HFConfig) -> DecoderSpec:
    """DeepSeek-MoE: V2's mixture behind Llama's attention; its shares may be renormalised."""
    mixture = deepseek_mixture(hf, has_bias=False)
    routing = dataclasses.replace(mixture.routing, renormalize=bool(hf.get("norm_topk_prob", False)))
    return with_deepseek_mixtures(hf, llama(hf), dataclasses.replace(mixture, routing=routing))


@register("DeepseekV2ForCausalLM")
def deepseek_v2(hf: HFConfig) -> DecoderSpec:
    """DeepSeek-V2, V2.5 and V2-Lite (whose queries have no latent), DeepSeek-Coder-V2."""
    dense = latent_decoder(hf, interleaved=True)
    return with_deepseek_mixtures(hf, dense, deepseek_mixture(hf, has_bias=False), _mixture_names())


@register("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
def deepseek_v3(hf: HFConfig) -> DecoderSpec:
    """DeepSeek-V3 and R1, Kimi-K2, Moonlight. Layers that guess further tokens are not read."""
    dense = latent_decoder(hf, interleaved=bool(hf.get("rope_interleave", True)))
    return with_deepseek_mixtures(hf, dense, deepseek_mixture(hf), _mixture_names())


INDEX_NAMES = {
    "index_q": "self_attn.indexer.wq_b",
    "index_k": "self_attn.indexer.wk",
    "index_k_norm": "self_attn.indexer.k_norm",
    "index_weights": "self_attn.indexer.weights_proj",
}


@register("DeepseekV32ForCausalLM")
def deepseek_v32(hf: HFConfig) -> DecoderSpec:
    """DeepSeek-V3.2: V3 that attends to the tokens that an indexer chooses."""
    return with_indexers(_without_mlp_bias(hf), hf, ["full"] * hf.num_hidden_layers, interleaved=False)


@register("GlmMoeDsaForCausalLM")
def glm_moe_dsa(hf: HFConfig) -> DecoderSpec:
    """GLM-5: as DeepSeek-V3.2, but some layers take an earlier one's choice."""
    return with_indexers(_without_mlp_bias(hf), hf, _indexer_types(hf), interleaved=True)


def _without_mlp_bias(hf: HFConfig) -> DecoderSpec:
    """DeepSeek-V3 whose feed-forwards have no biases, whatever its config says; layers' kinds may be told one by one."""
    return deepseek_v3(HFConfig(hf.to_dict() | {"mlp_bias": False}))


def _indexer_types(hf: HFConfig) -> list[str]:
    layers = range(hf.num_hidden_layers)
    kinds = hf.get("indexer_types") or hf.get("index_topk_pattern")
    if kinds:
        return [{"F": "full", "S": "shared"}.get(str(kind), str(kind)) for kind in kinds]
    every, offset = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
    return ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in layers]


def with_indexers(
    spec: DecoderSpec, hf: HFConfig, kinds: list[str], *, interleaved: bool, rope_last: bool = False, eps: float = 1e-6
) -> DecoderSpec:
    """A copy whose latent attention goes to chosen tokens; `kinds` says which layers choose (`full`) or share a choice.

    Raises:
        ConfigError: a layer has no choice to share, or queries have no latent.
    """
    if set(kinds) - {"full", "shared"} or kinds[:1] != ["full"] or len(kinds) < spec.layers:
        raise ConfigError(
            f"indexer_types={kinds} of config.json must have 'full' or 'shared' for each of {spec.layers} layers, and the first "
            "must be 'full'",
            setting="model",
        )
    mla = cast(MLA, spec.mixers_of(0)[0])
    if not mla.q_rank:
        raise ConfigError("q_lora_rank=None of config.json: an indexer reads the queries' latent", setting="model")
    rope = dataclasses.replace(mla.rope, interleaved=interleaved)
    indexer = Indexer(hf.index_n_heads, hf.index_head_dim, hf.index_topk, rope, LayerNorm(eps), rope_last)
    mixers: list[SparseMLA] = []
    for layer in range(spec.layers):
        owners = [owner for owner in range(layer + 1) if kinds[owner] == "full"]
        mixers.append(SparseMLA(**vars(mla), indexer=indexer, index_layer=None if owners[-1] == layer else owners[-1]))
    return dataclasses.replace(spec, mixer=tuple(mixers), weights=spec.weights.but((), **INDEX_NAMES))


@register("Mistral4ForCausalLM")
def mistral4(hf: HFConfig) -> DecoderSpec:
    """Mistral 4 (text): softmax over experts, queries that grow with each multiple of the original context."""
    dense = latent_decoder(hf, interleaved=bool(hf.get("rope_interleave", True)))
    mixture = deepseek_mixture(hf, has_bias=False)
    if hf.get("n_group", 1) > 1:
        raise ConfigError(
            f"n_group={hf.n_group} in a {hf.architectures[0]}: experts in groups are not known of it", setting="model"
        )
    mixer = dataclasses.replace(cast(MLA, dense.mixer), temperature=temperature_of(hf))
    routing = dataclasses.replace(mixture.routing, renormalize=bool(hf.get("norm_topk_prob", True)))
    dense, mixture = dataclasses.replace(dense, mixer=mixer), dataclasses.replace(mixture, routing=routing)
    return with_deepseek_mixtures(hf, dense, mixture, _mixture_names())


@register("YoutuForCausalLM")
def youtu(hf: HFConfig) -> DecoderSpec:
    """Youtu-LLM: latent attention in dense layers."""
    return latent_decoder(hf, interleaved=bool(hf.get("rope_interleave", True)))


@register("Glm4MoeLiteForCausalLM")
def glm4_moe_lite(hf: HFConfig) -> DecoderSpec:
    """GLM-4.7-Flash: DeepSeek-V3 whose config tells each layer's kind of feed-forward."""
    kinds = hf.get("mlp_layer_types") or ["dense"] + ["sparse"] * (hf.num_hidden_layers - 1)
    dense = latent_decoder(hf, interleaved=bool(hf.get("rope_interleave", True)))
    spec = with_deepseek_mixtures(hf, dense, deepseek_mixture(hf), _mixture_names())
    return with_experts(dense, deepseek_mixture(hf), lambda layer: kinds[layer] == "sparse", spec.weights)


@register("MiniCPM3ForCausalLM")
def minicpm3(hf: HFConfig) -> DecoderSpec:
    """MiniCPM3-4B."""
    depth, base = hf.get("scale_depth", 0), hf.get("dim_model_base", 0)
    return dataclasses.replace(
        latent_decoder(hf, interleaved=False),
        embedding_scale=float(hf.get("scale_emb", 1)),
        residual_scale=depth / hf.num_hidden_layers**0.5 if depth else 1.0,
        logits_scale=base / hf.hidden_size if base else 1.0,
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


LONGCAT_DENSE = ("mlps.{sub}.gate_proj", "mlps.{sub}.up_proj")
LONGCAT_NAMES = dataclasses.replace(
    EXPERT_NAMES.but(
        drop=("qkv", "q_norm", "k_norm"),
        q_a="self_attn.{sub}.q_a_proj",
        q_a_norm="self_attn.{sub}.q_a_layernorm",
        q_b="self_attn.{sub}.q_b_proj",
        kv_a="self_attn.{sub}.kv_a_proj_with_mqa",
        kv_a_norm="self_attn.{sub}.kv_a_layernorm",
        kv_b="self_attn.{sub}.kv_b_proj",
        out="self_attn.{sub}.o_proj",
        before_mixer="input_layernorm.{sub}",
        before_mlp="post_attention_layernorm.{sub}",
        gate_up=LONGCAT_DENSE,
        down="mlps.{sub}.down_proj",
        shared_gate_up=LONGCAT_DENSE,
        shared_down="mlps.{sub}.down_proj",
        router="mlp.router.classifier",
        router_bias="mlp.router.e_score_correction_bias",
    ),
    stacked={},
    sublayers=2,
)


@register("LongcatFlashForCausalLM")
def longcat_flash(hf: HFConfig) -> DecoderSpec:
    """LongCat-Flash: the rotation has a base of ten million where its config names none."""
    hf = renamed(
        hf, num_hidden_layers="num_layers", intermediate_size="ffn_hidden_size", num_experts_per_tok="moe_topk"
    )
    hf = defaults(hf, hidden_act="silu", zero_expert_num=256, routed_scaling_factor=6.0, rms_norm_eps=1e-5)
    hf = HFConfig(hf.to_dict() | {"num_hidden_layers": 2 * hf.num_hidden_layers, "mlp_bias": False})
    spec = latent_decoder(hf, interleaved=True)
    mla = cast(MLA, spec.mixers_of(0)[0])
    mla = dataclasses.replace(
        mla, q_latent_scale=(hf.hidden_size / mla.q_rank) ** 0.5, kv_latent_scale=(hf.hidden_size / mla.kv_rank) ** 0.5
    )
    dense = GatedMLP(hf.intermediate_size, hf.hidden_act)
    zero = int(hf.zero_expert_num or 0)
    mixture = MoE(
        Routing(
            hf.n_routed_experts + zero, hf.num_experts_per_tok, renormalize=False, scale=float(hf.routed_scaling_factor)
        ),
        hf.expert_ffn_hidden_size,
        hf.hidden_act,
        bias_correction=True,
        shared=dense,
        zero_experts=zero,
        late=True,
    )
    mlps = tuple(dense if layer % 2 else mixture for layer in range(spec.layers))
    return dataclasses.replace(spec, mixer=mla, mlp=mlps, weights=_names(hf.n_routed_experts, zero))


def _names(experts: int, zero: int) -> WeightNames:
    """Guessing layers, a bias that no router adds, and matrices of experts that have none are not read."""
    none = (f"*.mlp.experts.{expert}.*" for expert in range(experts, experts + zero))
    ignored = (*LONGCAT_NAMES.ignored, "*mtp.*", "*.classifier.bias", *none)
    return dataclasses.replace(LONGCAT_NAMES, ignored=ignored)


HY4_NAMES = EXPERT_NAMES.but(
    ("qkv", "q_norm", "k_norm"),
    **{name: LATENT_NAMES.modules[name] for name in LATENT_NAMES.modules if name.startswith(("q_", "kv_"))},
    **{f"mixer_hyper{end}": f"hc_pre.hc_attn_layer.hc_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
    **{f"mlp_hyper{end}": f"hc_pre.hc_mlp_layer.hc_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
    **{f"hyper_head{end}": f"hc_pre.hc_head.hc_head_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
    gate="self_attn.linear_gate",
    sinks="self_attn.learnable_sink_param",
    gate_up=("mlp.linear_gate", "mlp.up_proj"),
    shared_gate_up=("mlp.shared_experts.linear_gate", "mlp.shared_experts.up_proj"),
    experts_gate_up=("mlp.experts.{expert}.linear_gate", "mlp.experts.{expert}.up_proj"),
)


@register("HYV4ForCausalLM")
def hy_v4(hf: HFConfig) -> DecoderSpec:
    """HunYuan 4 (preview)."""
    hf = defaults(
        hf,
        q_lora_rank=1536,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        v_head_dim=256,
        n_shared_experts=1,
        routed_scaling_factor=2.827,
        index_topk=2048,
        index_head_dim=128,
        index_n_heads=16,
        hc_mult=4,
        hc_magnitude=2.0,
        hc_eps=1e-6,
        swiglu_limit=10.0,
    )
    hf = HFConfig(hf.to_dict() | {"mlp_bias": False})
    if hf.swiglu_limit <= 0:
        raise ConfigError(f"swiglu_limit={hf.swiglu_limit} of config.json must be above 0", setting="model")
    layers = range(hf.num_hidden_layers)
    dense = latent_decoder(hf, interleaved=False)
    mla = dataclasses.replace(cast(MLA, dense.mixers_of(0)[0]), sinks=True, output_gate=True)
    mixture = dataclasses.replace(deepseek_mixture(hf), clamp=ClampedSwiglu(1.0, float(hf.swiglu_limit), offset=0))
    kinds = hf.get("mlp_layer_types") or ["dense", *("sparse" for _ in layers[1:])]
    names = dataclasses.replace(HY4_NAMES, ignored=(*HY4_NAMES.ignored, *_guessing(hf)))
    spec = with_experts(dataclasses.replace(dense, mixer=mla), mixture, lambda layer: kinds[layer] == "sparse", names)
    indexers = hf.get("indexer_types") or ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in layers]
    spec = with_indexers(spec, hf, indexers, interleaved=False, rope_last=True, eps=hf.rms_norm_eps)
    hyper = HyperConnections(hf.hc_mult, hf.hc_eps, hf.rms_norm_eps, hf.hc_magnitude, write_eps=hf.hc_eps)
    return dataclasses.replace(spec, hyper=hyper)


def _guessing(hf: HFConfig) -> tuple[str, ...]:
    """Layers behind the last one, which guess further tokens."""
    return tuple(f"*layers.{hf.num_hidden_layers + more}.*" for more in range(hf.get("num_nextn_predict_layers", 1)))
