"""Ling 3: Kimi Delta Attention in most layers, latent attention with a gate for each head in the last one of each group; experts
in all but the first layers."""

import dataclasses
from typing import cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.deepseek import latent_decoder
from quire.models.kimi_linear import delta_names, with_deepseeks_words
from quire.models.mamba import check_silu
from quire.models.mixtures import EXPERT_NAMES, deepseek_mixture, with_deepseek_mixtures
from quire.models.patterns import defaults, kinds_of
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import MLA, DecoderSpec, KimiDelta

BAILING_HYBRID_NAMES = EXPERT_NAMES.but(
    ("qkv", "q_norm", "k_norm"),
    **delta_names("attention", "dense"),
    embedding="word_embeddings",
    q="attention.q_proj",
    kv_a="attention.kv_a_proj_with_mqa",
    kv_a_norm="attention.kv_a_layernorm",
    kv_b="attention.kv_b_proj",
    head_gate="attention.g_proj",
    out="attention.dense",
    router_bias="mlp.gate.expert_bias",
)
NOT_KNOWN = ("q_lora_rank", "expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
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
