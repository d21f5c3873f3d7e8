"""DeepSeek-V2 and V3 and what is built like them: multi-head latent attention, and mixtures in all but the first layers."""

import dataclasses
import math
from typing import cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import LLAMA_NAMES, temperature_of
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_deepseek_mixtures, with_experts
from quire.models.registry import register
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLA, DecoderSpec, GatedMLP, WeightNames
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
    fields = {field.name: getattr(mla, field.name) for field in dataclasses.fields(mla)}
    mixers: list[SparseMLA] = []
    for layer in range(spec.layers):
        owners = [owner for owner in range(layer + 1) if kinds[owner] == "full"]
        mixers.append(SparseMLA(**fields, indexer=indexer, index_layer=None if owners[-1] == layer else owners[-1]))
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
