"""HunYuan 4: sparse latent attention with a gate and sinks, experts with a clamped activation, several residual streams."""

import dataclasses
from typing import cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import ClampedSwiglu
from quire.models.deepseek import LATENT_NAMES, latent_decoder, with_indexers
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_experts
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.residual import HyperConnections
from quire.models.spec import MLA, DecoderSpec

NAMES = EXPERT_NAMES.but(
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
        hf, q_lora_rank=1536, hidden_act="silu", rms_norm_eps=1e-5, v_head_dim=256, n_shared_experts=1,
        routed_scaling_factor=2.827, index_topk=2048, index_head_dim=128, index_n_heads=16, hc_mult=4, hc_magnitude=2.0,
        hc_eps=1e-6, swiglu_limit=10.0,
    )  # fmt: skip
    hf = HFConfig(hf.to_dict() | {"mlp_bias": False})
    if hf.swiglu_limit <= 0:
        raise ConfigError(f"swiglu_limit={hf.swiglu_limit} of config.json must be above 0", setting="model")
    layers = range(hf.num_hidden_layers)
    dense = latent_decoder(hf, interleaved=False)
    mla = dataclasses.replace(cast(MLA, dense.mixers_of(0)[0]), sinks=True, output_gate=True)
    mixture = dataclasses.replace(deepseek_mixture(hf), clamp=ClampedSwiglu(1.0, float(hf.swiglu_limit), offset=0))
    kinds = hf.get("mlp_layer_types") or ["dense", *("sparse" for _ in layers[1:])]
    names = dataclasses.replace(NAMES, ignored=(*NAMES.ignored, *_guessing(hf)))
    spec = with_experts(dataclasses.replace(dense, mixer=mla), mixture, lambda layer: kinds[layer] == "sparse", names)
    indexers = hf.get("indexer_types") or ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in layers]
    spec = with_indexers(spec, hf, indexers, interleaved=False, rope_last=True, eps=hf.rms_norm_eps)
    hyper = HyperConnections(hf.hc_mult, hf.hc_eps, hf.rms_norm_eps, hf.hc_magnitude, write_eps=hf.hc_eps)
    return dataclasses.replace(spec, hyper=hyper)


def _guessing(hf: HFConfig) -> tuple[str, ...]:
    """Layers behind the last one, which guess further tokens."""
    return tuple(f"*layers.{hf.num_hidden_layers + more}.*" for more in range(hf.get("num_nextn_predict_layers", 1)))
