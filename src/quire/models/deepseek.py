"""DeepSeek-V2 and V3 and what has their latent attention: Kimi-K2, GLM-5, Mistral 4, MiniCPM3, LongCat-Flash, HunYuan 4.
DeepSeek-V4: attention to a window and to compressed tokens, several residual streams, and experts that the first layers look up
by token."""

import dataclasses
import math
from typing import Any, cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.kernels.types import ClampedSwiglu, Routing
from quire.models.llama import LLAMA_NAMES, llama, temperature_of
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_deepseek_mixtures, with_experts
from quire.models.patterns import defaults, kinds_of, renamed
from quire.models.registry import register
from quire.models.residual import HyperConnections, LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLA, DecoderSpec, GatedMLP, MoE, WeightNames
from quire.models.variants import BlockIndexer, CompressedAttention, Indexer, SparseMLA

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


WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
V4_NAMES = WeightNames(
    modules={
        "embedding": "embed",
        "q_a": "attn.wq_a",
        "q_a_norm": "attn.q_norm",
        "q_b": "attn.wq_b",
        "kv": "attn.wkv",
        "kv_norm": "attn.norm",
        "sinks": "attn.attn_sink",
        "out_a": "attn.wo_a",
        "out": "attn.wo_b",
        "block_kv": "attn.compressor.wkv",
        "block_gate": "attn.compressor.wgate",
        "block_bias": "attn.compressor.ape",
        "block_norm": "attn.compressor.norm",
        "index_kv": "attn.indexer.compressor.wkv",
        "index_gate": "attn.indexer.compressor.wgate",
        "index_bias": "attn.indexer.compressor.ape",
        "index_norm": "attn.indexer.compressor.norm",
        "index_q": "attn.indexer.wq_b",
        "index_weights": "attn.indexer.weights_proj",
        "router": "ffn.gate",
        "router_bias": "ffn.gate.bias",
        "token_experts": "ffn.gate.tid2eid",
        "experts_gate_up": ("ffn.experts.{expert}.w1", "ffn.experts.{expert}.w3"),
        "experts_down": "ffn.experts.{expert}.w2",
        "shared_gate_up": ("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
        "shared_down": "ffn.shared_experts.w2",
        **{f"mixer_hyper{end}": f"hc_attn_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
        **{f"mlp_hyper{end}": f"hc_ffn_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
        **{f"hyper_head{end}": f"hc_head_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
        "before_mixer": "attn_norm",
        "before_mlp": "ffn_norm",
        "final_norm": "norm",
        "lm_head": "head",
    },
    prefixes=("", "model."),
    ignored=(*EXPERT_NAMES.ignored, "mtp.*", "*.mtp.*"),
    aliases={"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", "lm_head.": "head."},
)


V4_LEFT_OUT = {
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "hidden_act": "silu",
}
"""What config.json need not say."""


@register("DeepseekV4ForCausalLM")
def deepseek_v4(hf: HFConfig) -> DecoderSpec:
    """DeepSeek-V4 Flash and Pro.

    Raises:
        ConfigError: another activation than silu, more than one key a token, or unknown scores.
    """
    hf = defaults(hf, **V4_LEFT_OUT)
    for name, value, allowed in (("hidden_act", hf.hidden_act, "silu"), ("num_key_value_heads", _kv_heads(hf), 1)):
        if value != allowed:
            raise ConfigError(f"{name}={value!r} of config.json must be {allowed!r} in a DeepSeek-V4", setting="model")
    if hf.scoring_func not in ("sqrtsoftplus", "sigmoid", "softmax"):
        raise ConfigError(
            f"scoring_func={hf.scoring_func!r} of config.json must be sqrtsoftplus, sigmoid or softmax", setting="model"
        )
    norm, layers = RMSNorm(hf.rms_norm_eps), range(hf.num_hidden_layers)
    kinds = _v4_kinds(hf)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(cast(Any, _v4_attention(hf, kinds[layer], norm)) for layer in layers),
        mlp=tuple(_v4_mixture(hf, is_looked_up) for is_looked_up in _looked_up(hf)),
        norm=norm,
        weights=V4_NAMES,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        hyper=HyperConnections(hf.hc_mult, hf.hc_eps, hf.rms_norm_eps, sinkhorn=max(hf.hc_sinkhorn_iters, 1)),
    )


def _kv_heads(hf: HFConfig) -> int:
    return hf.get("num_key_value_heads", 1)


def _v4_kinds(hf: HFConfig) -> list[str]:
    """Each layer's kind of attention, by name or by how many tokens become one."""
    kinds, ratios = kinds_of(hf, WINDOW, SPARSE, HEAVY), hf.get("compress_ratios")
    if kinds is None and ratios:
        known = {0: WINDOW} | {rate: kind for kind, rate in RATES.items()}
        if unknown := sorted({*ratios} - {*known}):
            raise ConfigError(
                f"compress_ratios of config.json has {', '.join(map(str, unknown))}; known: 0, 4, 128", setting="model"
            )
        kinds = [known[ratio] for ratio in ratios]
    if kinds is None:
        kinds = [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(hf.num_hidden_layers)]
    return kinds


def _looked_up(hf: HFConfig) -> list[bool]:
    """For each layer, whether its experts are looked up."""
    kinds, first = hf.get("mlp_layer_types"), hf.get("num_hash_layers", 3)
    return [kinds[layer] == "hash_moe" if kinds else layer < first for layer in range(hf.num_hidden_layers)]


def _v4_attention(hf: HFConfig, kind: str, norm: RMSNorm) -> CompressedAttention:
    own = {SPARSE: hf.get("compress_rate_csa"), HEAVY: hf.get("compress_rate_hca")}
    rates = RATES | dict(hf.to_dict().get("compress_rates") or {}) | {name: rate for name, rate in own.items() if rate}
    is_sparse = kind == SPARSE
    return CompressedAttention(
        heads=hf.num_attention_heads,
        head_dim=hf.head_dim,
        rope=_v4_rotation(hf, "main" if kind == WINDOW else "compress"),
        window=hf.sliding_window,
        norm=norm,
        q_rank=hf.q_lora_rank,
        out_groups=hf.o_groups,
        out_rank=hf.o_lora_rank,
        rate=0 if kind == WINDOW else int(rates[kind]),
        overlaps=is_sparse,
        indexer=BlockIndexer(hf.index_n_heads, hf.index_head_dim, hf.index_topk) if is_sparse else None,
    )


def _v4_rotation(hf: HFConfig, kind: str) -> Rope:
    """Layers that compress have a base of their own, and alone a stretched context, whose scores are not sharpened."""
    share = hf.get("partial_rotary_factor") or hf.get("qk_rope_head_dim", 64) / hf.head_dim
    values, rotary_dim = hf.to_dict(), int(hf.head_dim * share)
    given = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if is_dict(given.get("main")) and is_dict(given.get("compress")):
        parameters = dict(cast("dict[str, Any]", given[kind]))
    elif kind == "main":
        parameters = {"rope_type": "default", "rope_theta": hf.get("rope_theta", 10000.0)}
    else:
        parameters = given | {"rope_theta": hf.get("compress_rope_theta", 160000.0)}
    if parameters.get("rope_type", parameters.get("type")) == "yarn":
        parameters.setdefault("attention_factor", 1.0)
    kept = {name: value for name, value in values.items() if name not in ("rope_scaling", "rope_theta")}
    rope = Rope.from_hf(HFConfig(kept | {"rope_parameters": parameters | {"partial_rotary_factor": 1.0}}), rotary_dim)
    return dataclasses.replace(rope, rotary_dim=rotary_dim, interleaved=True)


def _v4_mixture(hf: HFConfig, is_looked_up: bool) -> MoE:
    size, limit = hf.moe_intermediate_size, float(hf.swiglu_limit)
    routing = Routing(
        hf.n_routed_experts, hf.num_experts_per_tok, scoring=hf.scoring_func, scale=float(hf.routed_scaling_factor)
    )
    return MoE(
        routing,
        size,
        hf.hidden_act,
        bias_correction=not is_looked_up,
        by_token=is_looked_up,
        clamp=ClampedSwiglu(1.0, limit, offset=0),
        shared=GatedMLP(size, hf.hidden_act, bias=bool(hf.get("mlp_bias", False)), limit=limit),
    )
