"""Qwen3-Next and Qwen3.5: three layers of Gated DeltaNet to one of gated attention, norms around zero; with experts, or dense."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, head_dim_of, llama
from quire.models.mamba import check_silu
from quire.models.patterns import kinds_of
from quire.models.qwen import MIXTURE_NAMES, qwen2_moe
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, DeltaNet, WeightNames

_DELTA = {
    "delta_conv": "linear_attn.conv1d.weight",
    "delta_a_log": "linear_attn.A_log",
    "delta_dt_bias": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm.weight",
    "delta_out": "linear_attn.out_proj",
}
FUSED = {"delta_in": "linear_attn.in_proj_qkvz", "delta_ba": "linear_attn.in_proj_ba"}
APART = {
    "delta_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "delta_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
NO_WINDOWS = {"use_sliding_window": False}
IGNORED = (*LLAMA_NAMES.ignored, "mtp.*", "model.visual.*")


def _apart(names: WeightNames) -> WeightNames:
    """Qwen3.5's names, also within a checkpoint that sees pictures."""
    names = names.but((), **_DELTA, **APART)
    return dataclasses.replace(names, prefixes=("model.", "model.language_model.", ""), ignored=IGNORED)


def _with_delta_net(hf: HFConfig, spec: DecoderSpec) -> DecoderSpec:
    """The spec's feed-forwards under Qwen3-Next's mixers and norms."""
    check_silu(hf)
    head_dim, norm, bias = head_dim_of(hf), RMSNorm(hf.rms_norm_eps, 1.0), bool(hf.get("attention_bias", False))
    rope = Rope.from_hf(HFConfig({"partial_rotary_factor": 0.25} | hf.to_dict()), head_dim)
    attention = Attention(
        hf.num_attention_heads, hf.num_key_value_heads, head_dim, rope, qk_norm=norm, qkv_bias=bias, out_bias=bias,
        output_gate=True,
    )  # fmt: skip
    delta = DeltaNet(
        key_heads=hf.linear_num_key_heads,
        heads=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        head_dim=hf.linear_value_head_dim,
        conv=hf.get("linear_conv_kernel_dim", 4),
        norm=RMSNorm(hf.rms_norm_eps),
    )
    every = hf.get("full_attention_interval", 4)
    kinds = kinds_of(hf, "linear_attention", "full_attention") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(spec.layers)
    ]
    mixers = tuple(attention if kind == "full_attention" else delta for kind in kinds)
    return dataclasses.replace(spec, mixer=mixers, norm=norm)


@register("Qwen3NextForCausalLM")
def qwen3_next(hf: HFConfig) -> DecoderSpec:
    """Qwen3-Next: experts with a gated shared one in (nearly) every layer. Its projections lie key head by key head."""
    names = dataclasses.replace(
        MIXTURE_NAMES.but((), **_DELTA, **FUSED), by_head=("delta_in", "delta_ba"), ignored=IGNORED
    )
    return dataclasses.replace(_with_delta_net(hf, qwen2_moe(HFConfig(hf.to_dict() | NO_WINDOWS))), weights=names)


@register("Qwen3_5ForCausalLM")
def qwen3_5(hf: HFConfig) -> DecoderSpec:
    """Qwen3.5's text model, dense."""
    return dataclasses.replace(_with_delta_net(hf, llama(hf)), weights=_apart(LLAMA_NAMES))


@register("Qwen3_5MoeForCausalLM")
def qwen3_5_moe(hf: HFConfig) -> DecoderSpec:
    """Qwen3.5's text model with experts in every layer."""
    spec = qwen2_moe(HFConfig({"norm_topk_prob": True, "intermediate_size": 0} | hf.to_dict() | NO_WINDOWS))
    return dataclasses.replace(_with_delta_net(hf, spec), weights=_apart(MIXTURE_NAMES))
