"""Qwen2 and Qwen3, dense and with experts; Qwen3-Next and Qwen3.5, which have three layers of Gated DeltaNet to one of gated
attention and norms around zero."""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, head_dim_of, llama
from quire.models.mamba import check_silu
from quire.models.patterns import defaults, full_where_not_sliding, kinds_of
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, DeltaNet, FeedForward, GatedMLP, MoE, WeightNames

MIXTURE_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        router="mlp.gate",
        experts_gate_up=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        experts_down="mlp.experts.{expert}.down_proj",
        shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        shared_gate="mlp.shared_expert_gate",
    ),
    stacked={"experts_gate_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"},
)


def with_windows(spec: DecoderSpec, hf: HFConfig) -> DecoderSpec:
    """A copy with the config's window in the layers of `layer_types`, or else in all from `max_window_layers` on."""
    first, layers = hf.get("max_window_layers", 0), range(hf.num_hidden_layers)
    kinds = ["full_attention" if layer < first else "sliding_attention" for layer in layers]
    return full_where_not_sliding(spec, defaults(hf, layer_types=kinds))


def _with_attention(hf: HFConfig, **changes: Any) -> DecoderSpec:
    spec = llama(hf).with_attention(**changes)
    return with_windows(spec, hf) if hf.get("use_sliding_window", False) else spec


@register("Qwen2ForCausalLM")
def qwen2(hf: HFConfig) -> DecoderSpec:
    """Qwen2 and Qwen2.5: biases on q, k and v, none on the output."""
    return _with_attention(hf, qkv_bias=True, out_bias=False)


@register("MiMoForCausalLM")
def mimo(hf: HFConfig) -> DecoderSpec:
    """MiMo-7B: Qwen2; the layers that guess further tokens are not read."""
    names = dataclasses.replace(LLAMA_NAMES, ignored=(*LLAMA_NAMES.ignored, "model.mtp_layers.*"))
    return dataclasses.replace(qwen2(hf), weights=names)


@register("Qwen3ForCausalLM")
def qwen3(hf: HFConfig) -> DecoderSpec:
    """Qwen3: an RMS norm over each query and key head."""
    return _with_attention(hf, qk_norm=RMSNorm(hf.rms_norm_eps))


def _with_mixtures(hf: HFConfig, dense: DecoderSpec, shared: GatedMLP | None) -> DecoderSpec:
    """Every `decoder_sparse_step`-th layer, but those in `mlp_only_layers`, has experts, if there are any."""
    experts = hf.num_experts if "num_experts" in hf else hf.num_local_experts
    mixture = MoE(
        Routing(experts, hf.num_experts_per_tok, renormalize=bool(hf.get("norm_topk_prob", False))),
        intermediate=hf.moe_intermediate_size,
        act=hf.hidden_act,
        shared=shared,
        shared_gate=shared is not None,
    )
    every, without = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers", [])
    mlps: tuple[FeedForward | None, ...] = tuple(
        mixture if experts and layer not in without and (layer + 1) % every == 0 else own
        for layer, own in enumerate(dense.mlps())
    )
    return dataclasses.replace(dense, mlp=mlps, weights=MIXTURE_NAMES)


@register("Qwen2MoeForCausalLM")
def qwen2_moe(hf: HFConfig) -> DecoderSpec:
    """Qwen1.5-MoE and Qwen2-MoE: one gated shared expert beside the routed ones; windows in every other of the first layers."""
    windows = [layer % 2 == 0 and layer < hf.get("max_window_layers", 28) for layer in range(hf.num_hidden_layers)]
    hf = defaults(hf, layer_types=["sliding_attention" if windowed else "full_attention" for windowed in windows])
    dense = _with_attention(hf, qkv_bias=bool(hf.get("qkv_bias", True)))
    return _with_mixtures(hf, dense, GatedMLP(hf.shared_expert_intermediate_size, hf.hidden_act))


@register("Qwen3MoeForCausalLM")
def qwen3_moe(hf: HFConfig) -> DecoderSpec:
    """Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder: routed experts only."""
    return _with_mixtures(hf, qwen3(HFConfig(hf.to_dict() | {"max_window_layers": 0})), None)


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
        hf.num_attention_heads,
        hf.num_key_value_heads,
        head_dim,
        rope,
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
        output_gate=True,
    )
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
