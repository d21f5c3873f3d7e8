"""Kimi-Linear: three layers of Kimi Delta Attention to one of latent attention without positions; experts in most layers."""

import dataclasses
from typing import cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.deepseek import LATENT_NAMES, latent_decoder
from quire.models.mamba import check_silu
from quire.models.mixtures import deepseek_mixture, with_deepseek_mixtures
from quire.models.patterns import defaults, kinds_of, renamed
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLA, DecoderSpec, KimiDelta


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
        hf, n_routed_experts="num_experts", n_shared_experts="num_shared_experts",
        num_experts_per_tok="num_experts_per_token", norm_topk_prob="moe_renormalize", n_group="num_expert_group",
        max_position_embeddings="model_max_length",
    )  # fmt: skip


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
