"""Qwen2 and Qwen3: Llama's plan with biases on q, k, v (2), or norms on query and key heads (3); dense, or with layers
whose feed-forward is a mixture of experts."""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import defaults, full_where_not_sliding
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import DecoderSpec, FeedForward, GatedMLP, MoE

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
