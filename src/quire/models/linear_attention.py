"""Decoders mostly of linear attention: Kimi-Linear, Ling 3, MiniMax-Text-01, and RWKV-4."""

import dataclasses
from typing import cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.deepseek import LATENT_NAMES, latent_decoder
from quire.models.llama import head_dim_of
from quire.models.llama_moe import MIXTRAL_NAMES, mixtral
from quire.models.mamba import check_silu
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_deepseek_mixtures
from quire.models.patterns import defaults, kinds_of, renamed
from quire.models.registry import register
from quire.models.residual import PRE, RESIDUAL_PRE, Joint, LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLA, ChannelMix, DecoderSpec, KimiDelta, Lightning, TimeMix, WeightNames


def delta_names(within: str, out: str) -> dict[str, str | tuple[str, ...]]:
    """Names of a mixer of Kimi Delta Attention whose decays and gates are made by one matrix each."""
    return {
        "delta_in": tuple(f"{within}.{part}_proj" for part in "qkv"),
        "delta_b": f"{within}.b_proj",
        "delta_decay": f"{within}.f_proj",
        "delta_gate": f"{within}.g_proj",
        "delta_conv": tuple(f"{within}.{part}_conv1d.weight" for part in "qkv"),
        "delta_a_log": f"{within}.A_log",
        "delta_dt_bias": f"{within}.dt_bias",
        "delta_norm": f"{within}.o_norm.weight",
        "delta_out": f"{within}.{out}",
    }


_EXPERT = "block_sparse_moe.experts.{expert}"
KIMI_LINEAR_NAMES = dataclasses.replace(
    LATENT_NAMES.but((), **delta_names("self_attn", "o_proj")).but(
        (),
        delta_decay="self_attn.f_a_proj",
        delta_decay_out="self_attn.f_b_proj",
        delta_gate="self_attn.g_a_proj",
        delta_gate_out="self_attn.g_b_proj",
        router="block_sparse_moe.gate",
        router_bias="block_sparse_moe.gate.e_score_correction_bias",
        experts_gate_up=(f"{_EXPERT}.w1", f"{_EXPERT}.w3"),
        experts_down=f"{_EXPERT}.w2",
        shared_gate_up=("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
        shared_down="block_sparse_moe.shared_experts.down_proj",
    ),
    flattened=("delta_a_log",),
    aliases={"block_sparse_moe.": "mlp."},  # what Transformers calls dense layers when it saves a checkpoint
)


def with_deepseeks_words(hf: HFConfig) -> HFConfig:
    """The config with DeepSeek's names for what Kimi-Linear and Ling 3 call otherwise."""
    return renamed(
        hf,
        n_routed_experts="num_experts",
        n_shared_experts="num_shared_experts",
        num_experts_per_tok="num_experts_per_token",
        norm_topk_prob="moe_renormalize",
        n_group="num_expert_group",
        max_position_embeddings="model_max_length",
    )


@register("KimiLinearForCausalLM")
def kimi_linear(hf: HFConfig) -> DecoderSpec:
    """Kimi-Linear."""
    check_silu(hf)
    linear = hf.get("linear_attn_config", HFConfig({}))
    hf = defaults(with_deepseeks_words(hf), first_k_dense_replace=1)
    spec = latent_decoder(hf, KIMI_LINEAR_NAMES, interleaved=False)
    latent = dataclasses.replace(cast(MLA, spec.mixer), rope=Rope.still(hf.qk_rope_head_dim), scale=None)
    size = linear.get("head_dim", hf.get("linear_head_dim", 128))
    delta = KimiDelta(
        heads=linear.get("num_heads", hf.get("linear_num_heads", 32)),
        head_dim=size,
        norm=RMSNorm(hf.rms_norm_eps),
        conv=linear.get("short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4)),
        decay_rank=size,
        gate_rank=size,
    )
    if hf.get("mla_use_nope", True) is not True:
        raise ConfigError(
            f"mla_use_nope={hf.mla_use_nope!r} of config.json must be true: Kimi-Linear's latent attention has no positions",
            setting="model",
        )
    mixers = tuple(latent if kind == "full_attention" else delta for kind in _kinds(hf, linear))
    spec = dataclasses.replace(
        spec, mixer=mixers, tied_embeddings=False
    )  # its head has its own matrix in every checkpoint
    return with_deepseek_mixtures(hf, spec, deepseek_mixture(hf), KIMI_LINEAR_NAMES)


def _kinds(hf: HFConfig, linear: HFConfig) -> list[str]:
    """`layer_types`, or the layers that `linear_attn_config` lists, of which the first is 1; else every fourth is full."""
    layers = range(hf.num_hidden_layers)
    if (kinds := kinds_of(hf, "linear_attention", "full_attention")) is not None:
        return kinds
    full = linear.get("full_attn_layers")
    if full is not None:
        return ["full_attention" if layer + 1 in full else "linear_attention" for layer in layers]
    return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in layers]


BAILING_HYBRID_NAMES = EXPERT_NAMES.but(
    ("qkv", "q_norm", "k_norm"),
    **delta_names("attention", "dense"),
    embedding="word_embeddings",
    q="attention.q_proj",
    q_a="attention.q_a_proj",
    q_a_norm="attention.q_a_layernorm",
    q_b="attention.q_b_proj",
    kv_a="attention.kv_a_proj_with_mqa",
    kv_a_norm="attention.kv_a_layernorm",
    kv_b="attention.kv_b_proj",
    head_gate="attention.g_proj",
    out="attention.dense",
    router_bias="mlp.gate.expert_bias",
)
NOT_KNOWN = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
"""Fields of checkpoints with code of their own that change what is computed."""


@register("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM")
def bailing_hybrid(hf: HFConfig) -> DecoderSpec:
    """Ling 3. Layers that guess further tokens are not read."""
    check_silu(hf)
    _check_known(hf)
    if "rope_theta" in hf.get("rope_parameters", {}):  # which is the one that counts, of two
        hf = HFConfig({name: value for name, value in hf.to_dict().items() if name != "rope_theta"})
    hf = defaults(
        with_deepseeks_words(hf), first_k_dense_replace=2, num_nextn_predict_layers=1, n_group=8, topk_group=4
    )
    spec = latent_decoder(hf, BAILING_HYBRID_NAMES, interleaved=True)
    delta = KimiDelta(
        heads=hf.num_attention_heads,
        head_dim=hf.get("linear_head_dim", hf.get("head_dim", 128)),
        norm=RMSNorm(hf.rms_norm_eps),
        conv=hf.get("short_conv_kernel_size", 4),
        floor=float(hf.get("kda_lower_bound", -5.0)) if hf.get("kda_safe_gate", True) else 0.0,
    )
    latent, every = dataclasses.replace(cast(MLA, spec.mixer), head_gate=True), hf.get("layer_group_size", 6)
    kinds = kinds_of(hf, "linear_attention", "full_attention") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(spec.layers)
    ]
    mixers = tuple(latent if kind == "full_attention" else delta for kind in kinds)
    spec = dataclasses.replace(
        spec, mixer=mixers, tied_embeddings=False
    )  # its head has its own matrix in every checkpoint
    return with_deepseek_mixtures(hf, spec, deepseek_mixture(hf), BAILING_HYBRID_NAMES)


def _check_known(hf: HFConfig) -> None:
    for name in NOT_KNOWN:
        value = hf.get(name)
        if value is not None and (not isinstance(value, list) or any(value)):
            raise ConfigError(
                f"{name}={value!r} of config.json is not known of Ling 3; it must be null", setting="model"
            )


MINIMAX_NAMES = dataclasses.replace(
    MIXTRAL_NAMES.but(
        lightning_in=("self_attn.qkv_proj", "self_attn.output_gate"),
        lightning_norm="self_attn.norm.weight",
        lightning_out="self_attn.out_proj",
    ),
    ignored=(
        *MIXTRAL_NAMES.ignored,
        "*.self_attn.slope_rate",
        "*.self_attn.query_decay",
        "*.self_attn.key_decay",
        "*.self_attn.diagonal_decay",
    ),
)
OUTPUT_EPSILON = 1e-6
"""Of the norm behind lightning attention, whatever `rms_norm_eps` says."""


@register("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")
def minimax(hf: HFConfig) -> DecoderSpec:
    """MiniMax-Text-01 and M1, with Transformers' words or with those of their first configs."""
    check_silu(hf)
    hf, placement = _with_transformers_words(hf), RESIDUAL_PRE if hf.get("postnorm", True) else PRE
    if hf.get("shared_intermediate_size"):
        raise ConfigError(
            f"shared_intermediate_size={hf.shared_intermediate_size} of config.json: shared experts are not known of MiniMax; "
            "it must be 0",
            setting="model",
        )
    spec = mixtral(hf)
    (attention, *_) = spec.attentions()
    kinds = kinds_of(hf, "linear_attention", "full_attention") or [
        "linear_attention" if layer % 2 else "full_attention" for layer in range(spec.layers)
    ]
    return dataclasses.replace(
        spec,
        mixer=tuple(
            attention if kind == "full_attention" else _lightning(hf, layer) for layer, kind in enumerate(kinds)
        ),
        placement=placement,
        joints=tuple((_joint(hf, kind.replace("ention", "n")), _joint(hf, "mlp")) for kind in kinds),
        weights=MINIMAX_NAMES,
    )


def _lightning(hf: HFConfig, layer: int) -> Lightning:
    """Heads forget at the rates of ALiBi's slopes, and less in later layers."""
    heads, layers = hf.num_attention_heads, hf.num_hidden_layers
    rate = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    decays = tuple(-rate * 2 ** (-8 * (head + 1) / heads) for head in range(heads))
    return Lightning(heads, head_dim_of(hf), decays, RMSNorm(OUTPUT_EPSILON))


def _joint(hf: HFConfig, half: str) -> Joint:
    return Joint(float(hf.get(f"{half}_alpha_factor", 1)), float(hf.get(f"{half}_beta_factor", 1)))


def _with_transformers_words(hf: HFConfig) -> HFConfig:
    """The first configs list kinds of attention as 0 and 1, and name factors and the rotation's share otherwise."""
    names = {
        f"{half}_{factor}_factor": f"layernorm_{theirs}_{factor}"
        for half, theirs in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
        for factor in ("alpha", "beta")
    }
    hf = renamed(hf, **names)
    kinds: list[int] | None = hf.get("attn_type_list")
    if kinds is not None:
        hf = defaults(hf, layer_types=["full_attention" if kind else "linear_attention" for kind in kinds])
    if (
        hf.get("rotary_dim") and hf.architectures[0] != "MiniMaxForCausalLM"
    ):  # whose class in Transformers turns whole heads
        hf = defaults(hf, partial_rotary_factor=hf.rotary_dim / head_dim_of(hf))
    return hf


_TIME, _CHANNEL = ("key", "value", "receptance"), ("key", "receptance")
RWKV_NAMES = WeightNames(
    modules={
        "embedding": "embeddings",
        "embedding_norm": "blocks.0.pre_ln",
        "before_mixer": "ln{sub1}",
        **{f"time_mix_{name}": f"attention.time_mix_{name}" for name in _TIME},
        **{f"time_{name}": f"attention.{name}" for name in _TIME},
        "time_decay": "attention.time_decay",
        "time_first": "attention.time_first",
        "time_out": "attention.output",
        **{f"channel_mix_{name}": f"feed_forward.time_mix_{name}" for name in _CHANNEL},
        **{f"channel_{name}": f"feed_forward.{name}" for name in (*_CHANNEL, "value")},
        "final_norm": "ln_out",
        "lm_head": "head",
    },
    prefixes=("rwkv.", ""),
    layer="blocks.{layer}.",
    sublayers=2,
    flattened=tuple(f"{half}_mix_{name}" for half, names in (("time", _TIME), ("channel", _CHANNEL)) for name in names),
)
FINAL_EPSILON = 1e-5
"""Of the last norm, whatever `layer_norm_epsilon` says."""


@register("RwkvForCausalLM")
def rwkv(hf: HFConfig) -> DecoderSpec:
    """RWKV-4 (Pile and World)."""
    blocks, hidden = hf.num_hidden_layers, hf.hidden_size
    time = TimeMix(hf.get("attention_hidden_size", hidden))
    channel = ChannelMix(hf.get("intermediate_size", 4 * hidden))
    joints = tuple(joint for block in range(blocks) for joint in _joints(block, hf.get("rescale_every", 6)))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hidden,
        layers=2 * blocks,
        mixer=(time, channel) * blocks,
        mlp=(None,) * (2 * blocks),
        norm=LayerNorm(hf.get("layer_norm_epsilon", 1e-5)),
        weights=RWKV_NAMES,
        max_positions=hf.get("context_length", 1024),
        embedding_norm=LayerNorm(hf.get("layer_norm_epsilon", 1e-5)),
        final_eps=FINAL_EPSILON,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        joints=joints if any(joint != Joint() for pair in joints for joint in pair) else (),
    )


def _joints(block: int, every: int) -> tuple[tuple[Joint, Joint], ...]:
    """The residual is halved behind every so many blocks, and what joins it later is too: norms' epsilons see that."""
    if every <= 0:
        return ((Joint(), Joint()),) * 2
    share, halved = 0.5 ** (block // every), 0.5 if (block + 1) % every == 0 else 1.0
    return (Joint(1.0, share), Joint()), (Joint(halved, share * halved), Joint())
